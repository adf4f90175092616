"""Rows of a corpus as users send them: five shapes, one check. No torch."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NoReturn

import msgspec

from coserve.errors import EmptyCorpus, MalformedRow
from coserve.state.durable import disk_errors
from coserve.types import Wire

MAX_ROWS = 1_000_000
MAX_ROW_BYTES = 16 << 20
MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class TextRow:
    """Learn the whole text."""

    line: int
    text: str


@dataclass(frozen=True)
class CompletionRow:
    """Learn `completion` as what follows `prompt`."""

    line: int
    prompt: str
    completion: str


@dataclass(frozen=True)
class ChatRow:
    """Learn the assistant's messages whose `weight` is not 0; the base's chat template makes the text."""

    line: int
    messages: tuple[dict[str, object], ...]


Row = TextRow | CompletionRow | ChatRow


class _Text(Wire, frozen=True):
    text: str

    def row(self, line: int) -> Row:
        return TextRow(line, self.text)


class _Completion(Wire, frozen=True):
    prompt: str
    completion: str

    def row(self, line: int) -> Row:
        return CompletionRow(line, self.prompt, self.completion)


class _Message(Wire, frozen=True, omit_defaults=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str
    name: str | None = None
    weight: Literal[0, 1] | None = None


class _Chat(Wire, frozen=True):
    messages: list[_Message]

    def row(self, line: int) -> Row:
        if any(message.weight is not None and message.role != "assistant" for message in self.messages):
            raise MalformedRow("expected a weight on assistant messages only", line=line, field="messages")
        return ChatRow(line, tuple(msgspec.to_builtins(message) for message in self.messages))


class _Alpaca(Wire, frozen=True):
    instruction: str
    output: str
    input: str = ""

    def row(self, line: int) -> Row:
        """The prompt of the Stanford Alpaca data set, word for word."""
        if self.input:
            prompt = (
                "Below is an instruction that describes a task, paired with an input that provides further context. "
                "Write a response that appropriately completes the request.\n\n"
                f"### Instruction:\n{self.instruction}\n\n### Input:\n{self.input}\n\n### Response:\n"
            )
        else:
            prompt = (
                "Below is an instruction that describes a task. "
                "Write a response that appropriately completes the request.\n\n"
                f"### Instruction:\n{self.instruction}\n\n### Response:\n"
            )
        return CompletionRow(line, prompt, self.output)


_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}


class _Turn(Wire, frozen=True, rename={"sender": "from"}):
    sender: Literal["human", "user", "gpt", "assistant", "system", "tool"]
    value: str


class _ShareGpt(Wire, frozen=True):
    conversations: list[_Turn]
    id: str | int | None = None

    def row(self, line: int) -> Row:
        turns: list[dict[str, object]] = [
            {"role": _SHAREGPT_ROLES[turn.sender], "content": turn.value} for turn in self.conversations
        ]
        return ChatRow(line, tuple(turns))


_Shape = _Text | _Completion | _Chat | _Alpaca | _ShareGpt
_SHAPES: dict[str, type[_Shape]] = {
    "text": _Text,
    "prompt": _Completion,
    "completion": _Completion,
    "messages": _Chat,
    "instruction": _Alpaca,
    "conversations": _ShareGpt,
}


def parse_row(obj: object, line: int) -> Row:
    """A row from decoded JSON. `line` counts from 1 and stands in the message of `MalformedRow`."""
    if not isinstance(obj, dict):
        raise MalformedRow(f"expected an object, got {type(obj).__name__}", line=line)
    shape = next((_SHAPES[key] for key in _SHAPES if key in obj), None)
    if shape is None:
        found = ", ".join(sorted(repr(key)[:40] for key in list(obj)[:8])) or "none"
        raise MalformedRow(
            "expected the fields of a text, prompt/completion, messages, alpaca or ShareGPT row, got " + found,
            line=line,
        )
    try:
        row = msgspec.convert(obj, shape).row(line)
        msgspec.json.encode(row)  # the tokenizer, too, wants text that UTF-8 can hold
    except msgspec.ValidationError as error:
        raise MalformedRow(str(error)[:300], line=line) from error
    except UnicodeEncodeError as error:
        raise MalformedRow("expected valid Unicode, got half of a surrogate pair", line=line) from error
    return row


def parse_rows(objects: Iterable[object]) -> Iterator[Row]:
    """Rows of an inline corpus; the first is line 1."""
    for line, obj in enumerate(objects, start=1):
        _check_rows(line)
        yield parse_row(obj, line)


def parse_jsonl(source: bytes | Path) -> Iterator[Row]:
    """Rows of a JSONL file, read line by line; empty lines are skipped but counted.

    Raises `MalformedRow` with the line: not JSON, not UTF-8, a duplicate or unknown field, NaN or Infinity, a line of
    more than `MAX_ROW_BYTES`, more than `MAX_ROWS` lines or `MAX_BYTES` bytes.
    """
    with io.BytesIO(source) if isinstance(source, bytes) else _open(source) as file:
        read = 0
        for line, content in enumerate(iter(lambda: file.readline(MAX_ROW_BYTES + 1), b""), start=1):
            read += len(content)
            _check_rows(line)
            if len(content) > MAX_ROW_BYTES:
                raise MalformedRow(f"expected at most {MAX_ROW_BYTES} bytes a line", line=line)
            if read > MAX_BYTES:
                raise MalformedRow(f"expected a corpus of at most {MAX_BYTES} bytes", line=line)
            if content.strip():
                yield parse_row(decode_line(content, line), line)


def _open(path: Path) -> BinaryIO:
    try:
        with disk_errors():
            return path.open("rb")
    except OSError as error:
        raise EmptyCorpus(f"the corpus cannot be read: {error.strerror}", field="path") from error


def _check_rows(line: int) -> None:
    if line > MAX_ROWS:
        raise MalformedRow(f"expected a corpus of at most {MAX_ROWS} rows", line=line)


def decode_line(content: bytes, line: int) -> object:
    """JSON by the letter: no NaN, no Infinity, no field twice. Raises `MalformedRow`."""
    try:
        text = content.decode("utf-8-sig" if line == 1 else "utf-8")
        found: object = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise MalformedRow("expected UTF-8", line=line) from error
    except json.JSONDecodeError as error:
        raise MalformedRow(f"expected JSON: {error.msg} (column {error.colno})", line=line) from error
    except ValueError as error:
        raise MalformedRow(str(error)[:200], line=line) from error
    except RecursionError as error:
        raise MalformedRow("expected JSON of moderate depth", line=line) from error
    return found


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"field {twice!r:.80} twice in one object")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"expected a finite number, got {constant}")


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        _refuse(digits[:40])
    return number
