"""Tokens and learned tokens of chats are those of transformers, where a template marks what the assistant writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coserve.corpus.rows import parse_row
from coserve.corpus.tokenize import tokenize_rows
from coserve.errors import MalformedRow
from coserve.pretrained.tokenizer import Tokenizer
from coserve.types import TrainOn

transformers = pytest.importorskip("transformers")

FOLDER = Path(__file__).resolve().parents[2] / "coserve" / "assets" / "tiny"
CALLS = "{% for call in m.tool_calls %}<call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</call>{% endfor %}"
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
    corpus = tokenize_rows([parse_row(row, 1)], ours(template), 4096, train_on)
    return corpus.tokens.tolist(), corpus.target.tolist()


@pytest.mark.parametrize("template", [MARKED, LAST_MARKED], ids=["marked", "earlier turns change"])
@pytest.mark.parametrize("name", CHATS)
def test_tokens_and_learned_tokens_are_those_of_transformers(name: str, template: str, theirs: Any) -> None:
    row = CHATS[name]
    found = theirs.apply_chat_template(
        row["messages"],
        tools=row.get("tools"),
        chat_template=template,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert any(found["assistant_masks"])
    for train_on in (None, "assistant"):
        assert learned(row, template, train_on) == (found["input_ids"], found["assistant_masks"])
    tokens, everything = learned(row, template, "all")
    assert tokens == found["input_ids"] and everything == [0] + [1] * (len(tokens) - 1)
    if row["messages"][-1]["role"] == "assistant":
        starts = np.flatnonzero(np.diff(found["assistant_masks"], prepend=0) == 1)
        last = [int(mask and at >= starts[-1]) for at, mask in enumerate(found["assistant_masks"])]
        assert learned(row, template, "completion") == (tokens, last)


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
