from __future__ import annotations

import contextlib
import time
from collections import UserDict
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from coserve.core.errors import InvalidRequest
from coserve.data.pretrained.chat import ChatTemplate, choose_template
from coserve.data.pretrained.tokenizer import Tokenizer
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


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ 1 | nonsense }}",
        "{{ 1 / 0 }}",
        "x" * (1 << 19),
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1] }}",
        "{{ cycler.__init__.__globals__.os.path }}",
        "{% include '/etc/passwd' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for a in 'a' %}" * 40 + "{% endfor %}" * 40,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ undefined_name.attribute }}",
        "{{ range(10**12) | list }}",
        "{{ '%c' % 55296 }}",
        "{{ raise_exception('%c' % 55296) }}",
    ],
)
def test_a_template_that_fails_is_an_error_of_the_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match="the base's chat template") as refused:
        ChatTemplate(source, TOKENS).render(CHAT)
    refused.value.message.encode()


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
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"  # noqa: E501
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


@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.sampled_from(["", "a", "é🐈", "ab cd"])), max_size=9),
    st.integers(0, 60),
    st.sampled_from([CHATML, QWEN_LIKE, REWRITES.replace("OPEN", OPEN).replace("CLOSE<|end|>", CLOSE)]),
)
def test_tokens_that_are_kept_are_learned_as_if_all_were(turns: list[tuple[str, str]], most: int, source: str) -> None:
    messages = [{"role": role, "content": content} for role, content in turns]
    tokenizer = Tokenizer(byte_level(), special_tokens=TOKENS, chat_template=source)
    try:
        ids, learn = tokenizer.encode_chat_for_training(messages)
    except InvalidRequest:
        return
    found = tokenizer.encode_chat_for_training(messages, most=most)
    assert found[0] == ids and found[1][:most] == learn[:most] and any(found[1]) == any(learn)


class Counted(UserDict[str, str]):
    """A message that counts how often one is rendered."""

    times = 0

    def __iter__(self) -> Iterator[str]:
        Counted.times += 1
        return super().__iter__()


@pytest.mark.parametrize("source", [CHATML, REWRITES], ids=["learned", "refused"])
def test_the_work_for_a_long_chat_is_bounded_by_what_is_kept_of_it(source: str) -> None:
    template, times = ChatTemplate(source, TOKENS, SPECIALS), []
    for turns in (100, 200):
        Counted.times = 0
        messages = [Counted(role=role, content="a text") for _ in range(turns) for role in ("user", "assistant")]
        with contextlib.suppress(InvalidRequest):
            template.render_for_training(messages, kept=lambda text: 300)
        times.append(Counted.times)
    assert times[0] > 0 and times[1] < 2 * times[0]


def test_choosing_among_named_templates() -> None:
    assert choose_template("a") == "a"
    assert choose_template([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]) == "d"
    assert choose_template([{"name": "tool_use", "template": "t"}]) is None
    assert choose_template(None) is None
