"""Rows of well-known datasets, as they are published."""

from __future__ import annotations

import pytest

from coserve.core.errors import MalformedRow
from coserve.data.corpus.columns import Columns
from coserve.data.corpus.rows import parse_row

SAID = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
ALPACA = {"instruction": "Add.", "output": "3"}
ALPACA_TEXT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nAdd.\n\n### Response:\n3"
)
CALL = [
    {"from": "human", "value": "1 and 2?"},
    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
    {"from": "observation", "value": "3"},
    {"from": "gpt", "value": "3."},
]
CALLED = [
    {"role": "user", "content": "1 and 2?"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "3."},
]
EMPTY = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
THOUGHT = {"reasoning_content": "hm"}
PAIR = {"chosen": SAID, "rejected": [SAID[0], {"role": "assistant", "content": "no"}]}


@pytest.mark.parametrize(
    ("row", "same", "unused"),
    [
        ({"messages": [SAID[0], SAID[1] | EMPTY]}, {"messages": SAID}, []),  # as OpenAI's client returns answers
        ({"messages": [SAID[0], SAID[1] | {"reasoning": "hm"}]}, {"messages": [SAID[0], SAID[1] | THOUGHT]}, []),
        (
            {"messages": [SAID[0], SAID[1] | THOUGHT | {"reasoning": "hm"}]},
            {"messages": [SAID[0], SAID[1] | THOUGHT]},
            [],
        ),
        ({"id": 1, "conversations": SAID}, {"messages": SAID}, ["id"]),
        (
            {
                "conversations": [
                    {"from": "human", "value": "hi", "weight": 0},
                    {"from": "gpt", "value": "no", "weight": 0},
                ]
            },
            {"messages": [SAID[0], {"role": "assistant", "content": "no", "weight": 0}]},
            [],
        ),
        (
            {"conversations": CALL, "tools": '[{"name": "add", "parameters": {}}]'},
            {"messages": CALLED, "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}]},
            [],
        ),
        ({"prompt": "hi", "prompt_id": "x", "messages": SAID}, {"messages": SAID}, ["prompt", "prompt_id"]),
        ({"prompt": "hi", "messages": SAID, **PAIR}, {"prompt": "hi", **PAIR}, ["messages"]),
        (ALPACA | {"text": ALPACA_TEXT}, ALPACA, ["text"]),
    ],
    ids=["openai", "vllm", "both", "conversations", "weights", "calls", "ultrachat", "ultrafeedback", "alpaca"],
)
def test_rows_of_well_known_datasets_are_read_as_they_are(
    row: dict[str, object], same: dict[str, object], unused: list[str]
) -> None:
    columns = Columns()
    assert parse_row(row, 1, columns) == parse_row(same, 1)
    assert list(columns.unused) == unused


@pytest.mark.parametrize(("called", "tools"), [("add", ""), ("[]", ""), (CALL[1]["value"], "{}")])
def test_calls_and_tools_that_are_none_are_refused(called: str, tools: str) -> None:
    turns = [CALL[0], {"from": "function_call", "value": called}]
    with pytest.raises(MalformedRow, match="line 7: expected function_call and tools in JSON"):
        parse_row({"conversations": turns, "tools": tools}, 7)
