"""Rows of a prompt and a completion that are lists of messages, as TRL's conversational datasets have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coserve.core.errors import MalformedRow, NoTargets
from coserve.core.training.settings import TrainOn
from coserve.data.corpus.rows import ChatRow, CompletionRow, parse_row
from coserve.data.corpus.tokenize import Tokenization, tokenize_rows
from coserve.data.pretrained.tokenizer import Tokenizer

ROW: dict[str, Any] = {
    "prompt": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "and?"},
    ],
    "completion": [
        {"role": "assistant", "content": "wait"},
        {"role": "user", "content": "for?"},
        {"role": "assistant", "content": "done"},
    ],
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def shown(tokenizer: Tokenizer, row: dict[str, Any], train_on: TrainOn | None = None) -> tuple[str, str]:
    """The whole text, and what of it is a target."""
    tokens, target = tokenize_rows([parse_row(row, 3)], tokenizer, Tokenization(1000, train_on)).row(0)
    whole, learned = tokens.tolist(), tokens[target.astype(np.bool_)].tolist()
    return tokenizer.decode(whole, skip_special=False), tokenizer.decode(learned, skip_special=False)


def test_the_completions_assistant_is_learned(tokenizer: Tokenizer) -> None:
    whole, learned = shown(tokenizer, ROW)
    assert whole == shown(tokenizer, {"messages": ROW["prompt"] + ROW["completion"]})[0]
    assert learned == "wait<|end|>done<|end|>"
    weighed = [ROW["completion"][0] | {"weight": 0}, *ROW["completion"][1:]]
    assert shown(tokenizer, ROW | {"completion": weighed})[1] == "done<|end|>"
    assert shown(tokenizer, {"prompt": [], "completion": ROW["completion"]})[1] == "wait<|end|>done<|end|>"


def test_a_weight_in_the_prompt_changes_nothing(tokenizer: Tokenizer) -> None:
    weighed = [one | {"weight": 1} if one["role"] == "assistant" else one for one in ROW["prompt"]]
    assert shown(tokenizer, ROW | {"prompt": weighed}) == shown(tokenizer, ROW)


def test_what_train_on_learns(tokenizer: Tokenizer) -> None:
    for train_on in ("completion", "assistant"):
        assert shown(tokenizer, ROW, train_on) == shown(tokenizer, ROW)
    whole, learned = shown(tokenizer, ROW, "all")
    assert whole == "<|user|>" + learned
    ends = ROW | {"completion": [*ROW["completion"], {"role": "user", "content": "bye"}]}
    assert shown(tokenizer, ends, "completion")[1] == "wait<|end|>done<|end|>"


def test_tools_go_with_messages() -> None:
    row = parse_row(ROW | {"tools": TOOLS}, 1)
    assert isinstance(row, ChatRow) and row.tools == tuple(TOOLS)
    assert parse_row({"prompt": "a", "completion": "b", "tools": []}, 1) == CompletionRow(1, "a", "b")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [{"role": "assistant", "content": "x"}], "completion": [{"role": "user", "content": "hi"}]},
        {"prompt": [{"role": "user", "content": "hi"}], "completion": []},
        {"prompt": [], "completion": []},
    ],
)
def test_a_completion_without_the_assistant_is_refused(tokenizer: Tokenizer, row: dict[str, Any]) -> None:
    with pytest.raises(NoTargets, match="line 3"):
        shown(tokenizer, row)


@pytest.mark.parametrize(
    ("row", "says", "field"),
    [
        (
            {"prompt": [{"role": "user", "content": "a", "weight": 1}], "completion": []},
            "line 1: expected weight on assistant messages only",
            "prompt[0].weight",
        ),
        (
            {"prompt": [], "completion": [{"role": "assistant"}]},
            "line 1: expected content, or tool_calls, in each message",
            "completion",
        ),
        (
            {"prompt": [], "completion": [{"role": "assistant", "content": 7}]},
            "line 1: completion[0].content: expected a string or an array or null, got an integer; ",
            "completion[0].content",
        ),
        (
            {"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]},
            "line 1: expected prompt and completion as two texts, or as two lists of messages",
            "completion",
        ),
        (
            {"prompt": [{"role": "user", "content": "a"}], "completion": "b"},
            "line 1: expected prompt and completion as two texts, or as two lists of messages",
            "completion",
        ),
        (
            {"prompt": "a", "completion": "b", "tools": [{"type": "function"}]},
            "line 1: expected tools beside messages only, got texts",
            "tools",
        ),
    ],
)
def test_the_error_of_a_row_names_its_field(row: dict[str, object], says: str, field: str) -> None:
    with pytest.raises(MalformedRow) as refused:
        parse_row(row, 1)
    assert refused.value.message.startswith(says)
    assert refused.value.field == field
