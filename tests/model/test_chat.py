from __future__ import annotations

import contextlib
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from coserve.errors import InvalidRequest
from coserve.pretrained.chat import ChatTemplate, choose_template
from coserve.pretrained.tokenizer import Tokenizer
from tests.support.examples import sample
from tests.support.tokenizers import byte_level

TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}
SPECIALS = ("<|user|>", "<|assistant|>", "<|end|>")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m['content'] | trim + '<|end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
QWEN_LIKE = (
    "{%- set ns = namespace(last=messages|length - 1, seen=[]) %}"
    "{%- for message in messages[::-1] %}{%- set ns.seen = ns.seen + [message.role] %}{%- endfor %}"
    "{%- macro turn(role, text) %}{{ '<|' ~ role ~ '|>' ~ text ~ '<|end|>' }}{% endmacro %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' and '</think>' in message.content %}"
    "{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}"
    "{%- else %}{%- set content = message.content %}{%- endif %}"
    "{{- turn(message.role, content if loop.last else content|replace('\\n', ' ')) }}{%- endfor %}"
    "{{- ns.seen | join(',') }}{{ {'a': [1, 2.5, none]} | tojson }}{{ messages | selectattr('role', 'equalto', 'user') "
    "| map(attribute='content') | list | length }}{{ '%s' % 'x' }}{{ namespace(a=1).a }}"
)
CHAT = [
    {"role": "user", "content": "hi\nthere"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "more? "},
    {"role": "assistant", "content": "<think>no</think>\nyes"},
]


def reference(source: str, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
    rendered, _ = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=add_generation_prompt, **TOKENS
    )
    text: str = rendered[0]
    return text


@pytest.mark.parametrize("source", [CHATML, LLAMA_2, QWEN_LIKE], ids=["chatml", "llama2", "qwen"])
@pytest.mark.parametrize("messages", [CHAT[:1], CHAT[:3], CHAT], ids=len)
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_as_transformers_does(source: str, messages: list[dict[str, str]], prompt: bool) -> None:
    template = ChatTemplate(source, TOKENS)
    assert template.render(messages, add_generation_prompt=prompt) == reference(source, messages, prompt)


def test_a_template_refuses_in_its_own_words() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as refused:
        ChatTemplate(LLAMA_2, TOKENS).render([CHAT[0], CHAT[0]])
    assert refused.value.field == "messages"


def test_no_messages() -> None:
    with pytest.raises(InvalidRequest, match="at least one message"):
        ChatTemplate(CHATML, TOKENS).render([])


def test_date_comes_from_the_clock() -> None:
    text = ChatTemplate("{{ strftime_now('%Y') }}", TOKENS).render(CHAT)
    assert text == time.strftime("%Y")


HOSTILE = {
    "repeat": "{{ 'x' * 10**9 }}",
    "repeat_parts": "{% set x = 'x' * 100000 %}{{ x * 100000 }}",
    "power": "{{ 9 ** 999999999 }}",
    "nested_power": "{{ 9 ** 999 ** 999 }}",
    "nested_loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "printing_loops": "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}",
    "range": "{{ range(10**12) | list }}",
    "center": "{{ 'x' | center(1000000000) }}",
    "method_center": "{{ 'x'.center(1000000000) }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "zfill": "{{ 'x'.zfill(1000000000) }}",
    "format_percent": "{{ '%1000000000d' % 1 }}",
    "format_star": "{{ '%*d' % (1000000000, 1) }}",
    "format_filter": "{{ '%1000000000d' | format(1) }}",
    "format_method": "{{ '{:1000000000}'.format(1) }}",
    "format_map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "indent": "{{ 'x' | indent(1000000000, true) }}",
    "tojson_indent": "{{ [1] | tojson(indent=1000000000) }}",
    "round": "{{ 5 | round(1000000000, 'floor') }}",
    "doubling_concat": "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling_add": "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling_block": "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}"
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "doubling_list": "{% set ns = namespace(x=['xxxxxxxx']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    "{{ ns.x }}",
    "doubling_dict": "{% set ns = namespace(x={}) %}{% for i in range(60) %}{% set ns.x = {1: ns.x, 2: ns.x} %}{% endfor %}"
    "{{ ns.x == ns.x }}",
    "doubling_dict_call": "{% set ns = namespace(x={}) %}{% for i in range(60) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}",
    "doubling_number": "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "doubling_replace": "{% set x = 'x' * 100000 %}{{ x.replace('x', x) }}",
    "replace_filter": "{% set x = 'x' * 100000 %}{{ x | replace('x', x) }}",
    "join": "{% set x = 'x' * 100000 %}{{ x | join(x) }}",
    "join_method": "{% set x = 'x' * 100000 %}{{ x.join(x) }}",
    "sum_of_lists": "{{ (['ab'] * 99999) | map('list') | sum(start=[]) | length }}",
    "strip": "{% set x = 'a' * 1000000 %}{{ ('b' * 1000000).strip(x ~ 'b') }}",
    "trim": "{% set x = 'a' * 1000000 %}{{ ('b' * 1000000) | trim(x ~ 'b') }}",
    "format_names": "{% set x = 'a' * 1000000 %}{{ ('%(x)s' * 100000) % {'x': x} }}",
    "format_filter_names": "{% set x = 'a' * 1000000 %}{{ ('%(x)s' * 100000) | format(x=x) }}",
    "nested_blocks": "{% for a in 'a' %}" * 40 + "{% endfor %}" * 40,
    "nested_parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "include": "{% include '/etc/passwd' %}",
    "many_large": "{% set x = 'x' * 1000000 %}{% for i in range(99999) %}{% set y = x ~ i %}{% endfor %}",
    "keep_large": "{% set x = 'x' * 1000000 %}{% set y %}{% for i in range(99999) %}{{ x ~ i }}{% endfor %}{% endset %}",
    "to_bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "lipsum": "{{ lipsum(n=1000000) }}",
    "batch": "{{ [1] | batch(1000000000, 0) | list }}",
    "strftime": "{{ strftime_now('%999999999d') }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive_list": "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}{{ undefined_name.attribute }}",
    "attribute": "{{ ''.__class__.__mro__ }}{{ cycler.__init__.__globals__.os }}",
    "namespace_printing": "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = namespace(a=ns.x, b=ns.x) %}"
    "{% endfor %}{{ ns.x }}{{ raise_exception('end') }}",
    "mutation": "{{ messages.append(1) }}",
    "syntax": "{% for %}",
    "unknown_filter": "{{ 1 | pprint }}",
    "division": "{{ 1 / 0 }}",
    "source": "x" * (1 << 19),
}


@pytest.mark.parametrize("source", sample(HOSTILE, *(set(HOSTILE) - {"sum_of_lists", "printing_loops"})))
def test_hostile_templates_end_with_a_typed_error(source: str) -> None:
    with pytest.raises(InvalidRequest, match="the base's chat template"):
        ChatTemplate(source, TOKENS).render(CHAT)


def test_the_tracer_from_before_is_back() -> None:
    before = sys.gettrace()
    for source in (CHATML, HOSTILE["nested_loops"]):
        try:
            ChatTemplate(source, TOKENS).render(CHAT)
        except InvalidRequest:
            assert source != CHATML
        assert sys.gettrace() is before


@given(st.text(max_size=30))
def test_random_templates_never_escape(source: str) -> None:
    with contextlib.suppress(InvalidRequest):
        ChatTemplate(source, TOKENS).render(CHAT)


def test_continuing_the_last_message() -> None:
    template = ChatTemplate(CHATML, TOKENS)
    assert template.render(CHAT[:2], continue_final=True).endswith("<|im_start|>assistant\nhello")
    open_ended = [CHAT[0], {"role": "assistant", "content": "hello "}]
    assert template.render(open_ended, continue_final=True).endswith("<|im_start|>assistant\nhello ")
    with pytest.raises(InvalidRequest, match="cannot continue"):
        ChatTemplate("nothing", TOKENS).render(CHAT, continue_final=True)


def test_learned_spans_are_the_content_and_the_end_of_turn() -> None:
    text, spans, _ = ChatTemplate(CHATML, TOKENS, SPECIALS).render_for_training(CHAT)
    assert [text[start:end] for start, end in spans] == ["hello<|end|>", "<think>no</think>\nyes<|end|>"]
    text, spans, _ = ChatTemplate(LLAMA_2, TOKENS).render_for_training(CHAT[:2])
    assert [text[start:end] for start, end in spans] == [" hello <eos>"]


def test_a_turn_without_a_special_token_is_learned_to_its_end() -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    text, spans, _ = ChatTemplate(source, TOKENS).render_for_training(CHAT[:2])
    assert [text[start:end] for start, end in spans] == ["hello\n"]


REWRITES = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}OPEN"
    "{{ m.content if loop.last else '...' }}CLOSE<|end|>{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OPEN, CLOSE = "{% generation %}", "<|end|>{% endgeneration %}"


def test_a_template_that_rewrites_turns_is_refused_without_marks() -> None:
    with pytest.raises(InvalidRequest, match="cannot tell what the assistant wrote"):
        ChatTemplate(REWRITES, TOKENS, SPECIALS).render_for_training(CHAT)


def test_a_template_that_rewrites_turns_is_read_by_its_marks() -> None:
    marked = REWRITES.replace("OPEN", OPEN).replace("CLOSE<|end|>", CLOSE)
    text, spans, _ = ChatTemplate(marked, TOKENS, SPECIALS).render_for_training(CHAT)
    assert [text[start:end] for start, end in spans] == ["...<|end|>", "<think>no</think>\nyes<|end|>"]
    without_end = REWRITES.replace("OPEN", OPEN).replace("CLOSE<|end|>", "{% endgeneration %}<|end|>")
    assert ChatTemplate(without_end, TOKENS, SPECIALS).render_for_training(CHAT) == (text, spans, True)


def test_marks_in_a_captured_block_are_not_trusted() -> None:
    marked = "{% set all %}" + REWRITES.replace("OPEN", OPEN).replace("CLOSE<|end|>", CLOSE) + "{% endset %}>{{ all }}"
    with pytest.raises(InvalidRequest, match="cannot tell what the assistant wrote"):
        ChatTemplate(marked, TOKENS, SPECIALS).render_for_training(CHAT)


def test_weights_choose_the_turns_to_learn() -> None:
    template = CHATML.replace("im_start|>", "user|>")
    tokenizer = Tokenizer(byte_level(), special_tokens=TOKENS, chat_template=template)
    messages = [CHAT[0], {**CHAT[1], "weight": 0}, CHAT[2], {**CHAT[3], "weight": 1}]
    ids, learn = tokenizer.encode_chat_for_training(messages)
    learned = [id for id, wanted in zip(ids, learn, strict=True) if wanted]
    assert tokenizer.decode(learned, skip_special=False) == "<think>no</think>\nyes<|end|>"
    whole = ChatTemplate(template, TOKENS, SPECIALS).render(CHAT, add_generation_prompt=False)
    assert tokenizer.decode(ids, skip_special=False) == whole


def test_choosing_among_named_templates() -> None:
    assert choose_template("a") == "a"
    assert choose_template([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]) == "d"
    assert choose_template([{"name": "tool_use", "template": "t"}]) is None
    assert choose_template(None) is None
