"""ShareGPT's conversations, without times: a JSON array of objects, as in its published file, or one object per line.

    [{"id": "x_0", "conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}]

The first message is the prompt and the second the answer, as in FlexLLM's recipe and `vllm bench serve`. Conversations
that do not begin with a human message and an answer are skipped.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from coserve.data.corpus.json_array import array_elements
from coserve.workloads.formats.lines import JSON_ERRORS, not_json, read_lines, reading

MAX_CONVERSATION = 1 << 24
"""Maximum bytes of a conversation. It bounds the memory that a file can take."""
HUMANS, MODELS = ("human", "user"), ("gpt", "assistant", "chatgpt")


class Conversation(NamedTuple):
    prompt: str
    answer: str


class _Turn(msgspec.Struct):
    speaker: str = msgspec.field(name="from")
    value: str


class _Record(msgspec.Struct):
    conversations: list[_Turn]


def read_sharegpt(path: Path, *, most: int = MAX_CONVERSATION) -> Iterator[Conversation]:
    """Yield the conversations, of about `most` bytes at most. Raises `MalformedRow` with the file and the line (for an
    array, the element's number), `InvalidRequest` for a missing file."""
    decoder = msgspec.json.Decoder(_Record)
    with reading(path):
        for number, content in _records(path, most):
            try:
                turns = decoder.decode(content).conversations
            except JSON_ERRORS as error:
                raise not_json(error, number) from error
            if len(turns) > 1 and turns[0].speaker in HUMANS and turns[1].speaker in MODELS:
                prompt, answer = turns[0].value, turns[1].value
                if prompt.strip() and answer.strip():
                    yield Conversation(prompt, answer)


def _records(path: Path, most: int) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        if file.peek().removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            yield from array_elements(file, most)
        else:
            yield from read_lines(path, most)
