"""Tokens and learned tokens of chats are those of transformers, where a template marks what the assistant writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from coserve.core.errors import MalformedRow
from coserve.core.training.settings import TrainOn
from coserve.data.corpus.rows import parse_row
from coserve.data.corpus.tokenize import Tokenization, tokenize_rows
from coserve.data.pretrained.chat import ChatTemplate
from coserve.data.pretrained.tokenizer import Tokenizer
from tests.support.tokenizers import byte_level, sentencepiece_like

transformers = pytest.importorskip("transformers")

FOLDER = Path(__file__).resolve().parents[2] / "coserve" / "assets" / "tiny"
CALLS = "{% for call in m.tool_calls %}<call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</call>{% endfor %}"  # noqa: E501
MARKED = (
    "{%- if tools %}<|system|>{{ tools | tojson(indent=2) }}<|end|>{% endif -%}"
    "{%- for m in messages -%}<|{{ m.role }}|>"
    "{%- if m.role == 'assistant' %}[now]{% generation %}{{ m.content }}" + CALLS + "<|end|>{% endgeneration %}"
    "{%- else %}{% if m.name %}{{ m.name }}: {% endif %}{{ m.content | trim }}<|end|>{% endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt %}<|assistant|>{% endif -%}"
)
"""`[now]` stands before what the assistant writes, and is no part of the generation prompt."""
LAST_MARKED = MARKED.replace("m.content }}" + CALLS, "m.content if loop.last else m.content | upper }}" + CALLS)
"""Earlier turns change with what follows them."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Rain or sun, »heute«",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}
CHATS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ahoy!"}]},
    "system and turns": {
        "messages": [
            {"role": "system", "content": "Be kind. "},
            {"role": "user", "content": " Hi\n"},
            {"role": "assistant", "content": "Hm, the cat 🐈."},
            {"role": "user", "content": "Hello?"},
            {"role": "assistant", "content": " Ahoy!\n"},
        ]
    },
    "ends with the user": {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hm."},
            {"role": "user", "content": "Hello?"},
        ]
    },
    "tools": {
        "messages": [
            {"role": "system", "content": "Use tools."},
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
            {"role": "tool", "content": '{"rain": true}', "tool_call_id": "c1", "name": "weather"},
            {"role": "assistant", "content": "Yes.", "tool_calls": [CALL]},
            {"role": "tool", "content": "no", "tool_call_id": "c1"},
            {"role": "assistant", "content": "Bring a hat."},
        ],
        "tools": TOOLS,
    },
}


@pytest.fixture(scope="module")
def theirs() -> Any:
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


def ours(template: str) -> Tokenizer:
    bundled = Tokenizer.load("bundled")
    bundled.chat_template = template
    return Tokenizer.from_state(bundled.state())


def learned(row: dict[str, Any], template: str, train_on: TrainOn | None) -> tuple[list[int], list[int]]:
    corpus = tokenize_rows([parse_row(row, 1)], ours(template), Tokenization(4096, train_on))
    return corpus.tokens.tolist(), corpus.target.tolist()


def masked_by(theirs: Any, row: dict[str, Any], template: str) -> Any:
    """The tokens of a chat and their mask, as transformers gives them."""
    return theirs.apply_chat_template(
        row["messages"],
        tools=row.get("tools"),
        chat_template=template,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )


@pytest.mark.parametrize("template", [MARKED, LAST_MARKED], ids=["marked", "earlier turns change"])
@pytest.mark.parametrize("name", CHATS)
def test_tokens_and_learned_tokens_are_those_of_transformers(name: str, template: str, theirs: Any) -> None:
    row = CHATS[name]
    found = masked_by(theirs, row, template)
    assert any(found["assistant_masks"])
    for train_on in (None, "assistant"):
        assert learned(row, template, train_on) == (found["input_ids"], found["assistant_masks"])
    tokens, everything = learned(row, template, "all")
    assert tokens == found["input_ids"] and everything == [0] + [1] * (len(tokens) - 1)
    if row["messages"][-1]["role"] == "assistant":
        starts = np.flatnonzero(np.diff(found["assistant_masks"], prepend=0) == 1)
        last = [int(mask and at >= starts[-1]) for at, mask in enumerate(found["assistant_masks"])]
        assert learned(row, template, "completion") == (tokens, last)


SEVERAL = MARKED.replace("{% generation %}", "{% generation %}Well{% endgeneration %}, {% generation %}")
BEHIND = MARKED + "{% if not add_generation_prompt %}{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}"
"""As TRL's template for Phi-3: EOS ends the chat, in a block of its own."""


@pytest.mark.parametrize("template", [SEVERAL, BEHIND], ids=["several in a turn", "one behind the last turn"])
@pytest.mark.parametrize("name", CHATS)
def test_templates_with_other_than_one_block_a_turn(name: str, template: str, theirs: Any) -> None:
    row = CHATS[name]
    found = masked_by(theirs, row, template)
    tokens, mask = found["input_ids"], np.array(found["assistant_masks"])
    assert learned(row, template, None) == (tokens, mask.tolist())
    if row["messages"][-1]["role"] == "assistant":
        (headers,) = np.nonzero(np.array(tokens) == theirs.convert_tokens_to_ids("<|assistant|>"))
        last = np.arange(len(tokens)) > headers[-1]
        assert learned(row, template, "completion") == (tokens, (mask * last).tolist())
        messages = [{**one, "weight": 0} if one["role"] == "assistant" else one for one in row["messages"][:-1]]
        weighted = {**row, "messages": [*messages, row["messages"][-1]]}
        assert learned(weighted, template, None) == (tokens, (mask * last).tolist())


@pytest.mark.parametrize("weights", [(0, 1), (1, 0), (1, 1)])
def test_two_blocks_of_one_turn_and_none_of_another_are_told_apart(weights: tuple[int, int]) -> None:
    """Though there are as many blocks as answers."""
    block = "{% generation %}<|think|>{% endgeneration %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    template = "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and m.content %}" + block
    template += "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    template += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    messages = [("user", "Hi"), ("assistant", ""), ("user", "Hello?"), ("assistant", "Ahoy!")]
    chat = [{"role": role, "content": content} for role, content in messages]
    answers = [at for at, weight in zip((1, 3), weights, strict=True) if weight]
    text, spans, _ = ChatTemplate(template, {}, ["<|end|>"]).render_for_training(chat, learned=answers)
    expected = ["<|think|>", "Ahoy!<|end|>"] if weights[1] else []
    assert [text[start:end] for start, end in spans] == expected


def test_an_end_of_turn_outside_of_the_marks_is_learned_too(theirs: Any) -> None:
    """transformers leaves it out, and a model trained so would never stop."""
    template = MARKED.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>")
    row = CHATS["system and turns"]
    found = theirs.apply_chat_template(
        row["messages"], chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    end = theirs.convert_tokens_to_ids("<|end|>")
    tokens, target = learned(row, template, None)
    before = np.array([0, *found["assistant_masks"][:-1]], np.bool_)
    expected = np.array(found["assistant_masks"], np.bool_) | (before & (np.array(tokens) == end))
    assert tokens == found["input_ids"] and target == expected.astype(int).tolist()
    assert sum(target) == sum(found["assistant_masks"]) + 2


def test_all_of_a_chat_is_learned_where_the_assistants_part_cannot_be_told() -> None:
    template = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    changing = template.replace("m.content }}" + CALLS, "m.content if loop.last else m.content | upper }}" + CALLS)
    row = CHATS["tools"]
    with pytest.raises(MalformedRow, match="cannot tell what the assistant wrote"):
        learned(row, changing, None)
    tokens, target = learned(row, changing, "all")
    assert target == [0] + [1] * (len(tokens) - 1)
    without_calls = changing.replace(CALLS, "")
    with pytest.raises(MalformedRow, match="leaves tool_calls out"):
        learned(row, without_calls, "all")


TRL_STYLE = (
    "{%- for m in messages -%}{{ '<|im_start|>' ~ m.role ~ '\\n' }}"
    "{%- if m.role == 'assistant' -%}{% generation %}{{ m.content }}{{ '<|im_end|>\\n' }}{% endgeneration %}"
    "{%- else -%}{{ m.content ~ '<|im_end|>\\n' }}{% endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"
)
"""As TRL's training templates for Qwen and others: the block ends with the line break behind the end of turn."""
OPEN_BLOCKS = TRL_STYLE.replace("{{ '<|im_end|>\\n' }}{% endgeneration %}", "{% endgeneration %}{{ '<|im_end|>\\n' }}")
UNMARKED = TRL_STYLE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
TURNS = CHATS["system and turns"]


def chatml(stripping: tuple[str, ...] = (), *, space: bool = False) -> Any:
    """A backend with ChatML's tokens, of which those named in `stripping` swallow the white space behind them."""
    backend = sentencepiece_like() if space else byte_level()
    added = [AddedToken(token, rstrip=token in stripping, special=True) for token in ("<|im_start|>", "<|im_end|>")]
    backend.add_special_tokens(added)
    return backend


def both_masks(backend: Any, template: str, messages: Any) -> tuple[list[str], list[str]]:
    """The texts of the learned tokens: ours and those of transformers."""
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    found = wrapped.apply_chat_template(
        messages, chat_template=template, return_dict=True, return_assistant_tokens_mask="generation %}" in template
    )
    tokenizer = Tokenizer(backend, special_tokens={"eos_token": "<eos>"}, chat_template=template)
    ids, learn = tokenizer.encode_chat_for_training(messages)
    assert ids == found["input_ids"]
    masks = (learn, found.get("assistant_masks", [0] * len(ids)))
    ours, theirs = ([backend.id_to_token(id) for id, own in zip(ids, mask, strict=True) if own] for mask in masks)
    return ours, theirs


@pytest.mark.parametrize("space", [False, True], ids=["byte_level", "sentencepiece"])
@pytest.mark.parametrize(
    "stripping", [(), ("<|im_end|>",), ("<|im_start|>", "<|im_end|>")], ids=["none", "end", "both"]
)
def test_blocks_that_end_behind_the_end_of_turn_are_learned_as_transformers_marks_them(
    stripping: tuple[str, ...], space: bool
) -> None:
    ours, theirs = both_masks(chatml(stripping, space=space), TRL_STYLE, TURNS["messages"])
    if space and not stripping:
        assert ours[-2:] == ["▁", "<0x0A>"]
    # transformers 5.17 learns only the first of the tokens that form a block's last character.
    first = [token for before, token in zip(["", *ours], ours, strict=False) if (before, token) != ("▁", "<0x0A>")]
    assert theirs in (ours, first)
    assert ours.count("<|im_end|>") == 2 and "<|im_start|>" not in ours


THOUGHTS = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }} "
    "{%- if m.reasoning_content %}{% generation %}{{ m.reasoning_content }} {% endgeneration %}{% endif -%}"
    "{%- if m.role != 'assistant' %}{{ m.content }}<|im_end|>"
    "{%- elif m.content %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endif -%}"
    "{%- endfor -%}"
)
ANSWERS = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.sampled_from(["", "yes"])},
    optional={"reasoning_content": st.sampled_from(["hm", "so"])},
)


@given(answers=st.lists(ANSWERS, max_size=3))
def test_answers_may_have_any_number_of_blocks(answers: list[dict[str, str]]) -> None:
    asked, last = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "no"}
    messages = [message for answer in (*answers, last) for message in (asked, answer)]
    ours, theirs = both_masks(chatml(), THOUGHTS, messages)
    assert ours == theirs


@pytest.mark.parametrize("template", [UNMARKED, OPEN_BLOCKS], ids=["unmarked", "blocks without it"])
@pytest.mark.parametrize(
    "stripping", [(), ("<|im_end|>",), ("<|im_start|>", "<|im_end|>")], ids=["none", "end", "both"]
)
def test_an_end_of_turn_that_swallows_white_space_is_learned(stripping: tuple[str, ...], template: str) -> None:
    ours, _ = both_masks(chatml(stripping), template, TURNS["messages"])
    assert ours.count("<|im_end|>") == 2 and "<|im_start|>" not in ours
    plain, _ = both_masks(chatml(), template, TURNS["messages"])
    assert ours == plain


def test_a_turn_whose_end_is_no_token_of_its_own_is_refused() -> None:
    backend = byte_level()
    backend.add_special_tokens([AddedToken("stop", special=True, single_word=True)])
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}stop\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"  # noqa: E501
    tokenizer = Tokenizer(backend, special_tokens={"eos_token": "<eos>"}, chat_template=template)
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ahoy"}]}
    with pytest.raises(MalformedRow, match="the end of turn 'stop' to be a token of its own"):
        tokenize_rows([parse_row(row, 1)], tokenizer, Tokenization(64))
    row["messages"][1]["content"] = "Ahoy! "
    corpus = tokenize_rows([parse_row(row, 1)], tokenizer, Tokenization(64))
    assert backend.id_to_token(int(corpus.tokens[corpus.target == 1][-1])) == "stop"
