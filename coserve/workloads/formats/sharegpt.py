"""ShareGPT's conversations, without times: a JSON array of objects, as in its published file, or one object per line.

    [{"id": "x_0", "conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}]

The first message is the prompt and the second the answer, as in FlexLLM's recipe and `vllm bench serve`. Conversations
that do not begin with a human message and an answer are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from coserve.core.errors import MalformedRow
from coserve.workloads.formats.json_stream import read_objects
from coserve.workloads.formats.lines import naming

HUMANS, MODELS = ("human", "user"), ("gpt", "assistant", "chatgpt")


class Conversation(NamedTuple):
    prompt: str
    answer: str


class _Turn(msgspec.Struct):
    speaker: str = msgspec.field(name="from")
    value: str


class _Record(msgspec.Struct):
    conversations: list[_Turn]


def read_sharegpt(path: Path) -> Iterator[Conversation]:
    """Yield the conversations. Raises `MalformedRow` with the file and the line at which a conversation begins,
    `InvalidRequest` for a missing file."""
    for line, content in read_objects(path):
        with naming(path):
            turns = _turns(content, line)
        if len(turns) > 1 and turns[0].speaker in HUMANS and turns[1].speaker in MODELS:
            prompt, answer = turns[0].value, turns[1].value
            if prompt.strip() and answer.strip():
                yield Conversation(prompt, answer)


def _turns(content: dict[str, Any], line: int) -> list[_Turn]:
    try:
        turns = msgspec.convert(content, _Record).conversations
        msgspec.json.encode(turns[:2])  # raises for text without a UTF-8 form, which no tokenizer accepts
    except msgspec.ValidationError as error:
        raise MalformedRow(str(error), line=line) from error
    except UnicodeEncodeError as error:
        raise MalformedRow("expected text, got half of a surrogate pair", line=line) from error
    return turns
