"""Recorded traces in the formats of others: BurstGPT, Mooncake and ShareGPT."""

from __future__ import annotations

import codecs
import csv
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from coserve.core.errors import InvalidRequest, MalformedRow
from coserve.data.corpus.json_array import array_elements

JSON_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions that reading JSON can raise."""
MAX_LINE = 1 << 26
"""Maximum bytes of a line. It bounds the memory that a file can take."""
MAX_TOKENS = 1 << 22
"""Maximum tokens of a recorded prompt or answer."""


class Recorded(NamedTuple):
    """A recorded request: seconds since the recording's beginning, lengths in tokens, and the hashes of the prompt's
    blocks (Mooncake)."""

    at: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def read_lines(path: Path, max_line: int = MAX_LINE) -> Iterator[tuple[int, bytes]]:
    """Yield number (from 1) and content of each line that is not blank, without its line end.

    A byte order mark at the beginning is skipped. Raises `MalformedRow` for a line of more than `max_line` bytes.
    """
    with path.open("rb") as file:
        number = 0
        while line := file.readline(max_line):
            number += 1
            if len(line) == max_line and not line.endswith(b"\n"):
                raise MalformedRow(f"expected at most {max_line} bytes, got more", line=number)
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield number, line.rstrip(b"\r\n")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Add the file's name, without its folder, to each `MalformedRow` raised in the block. Raises `InvalidRequest` for
    a file that cannot be read."""
    try:
        yield
    except OSError as error:
        raise InvalidRequest(f"cannot read the trace: {error.strerror}", field="trace") from error
    except MalformedRow as error:
        where = f"{path.name}, " if error.line is not None else f"{path.name}: "
        named = MalformedRow(where + error.message)
        named.line = error.line
        raise named from error


def not_utf8(path: Path, error: UnicodeDecodeError) -> MalformedRow:
    """Return the error for a file that is not UTF-8, with the line of its first invalid byte. The file is read again,
    since a text reader is ahead of what it returned."""
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    with path.open("rb") as file:
        while chunk := file.read(1 << 18):
            try:
                decoder.decode(chunk)
            except UnicodeDecodeError as found:
                line += found.object.count(b"\n", 0, found.start)
                break
            line += chunk.count(b"\n")
    return MalformedRow(f"expected UTF-8, got {error.reason}", line=line)


def not_json(error: Exception, line: int) -> MalformedRow:
    """Return the error for one of `JSON_ERRORS`."""
    deep = "expected JSON, got too many brackets inside each other"
    return MalformedRow(deep if isinstance(error, RecursionError) else str(error), line=line)


def check_order(at: float, before: float, line: int) -> None:
    """Raise `MalformedRow` if times are not ascending."""
    if at < before:
        raise MalformedRow(f"expected times in order, got {at:g} after {before:g}", line=line)


TIME, MODEL, PROMPT, OUTPUT = "Timestamp", "Model", "Request tokens", "Response tokens"
"""Columns of BurstGPT."""


def read_burstgpt(path: Path, model: str | None = None) -> Iterator[Recorded]:
    """Yield the requests of `model` (None: of all models) in a trace of BurstGPT (Wang et al., arXiv 2401.17644): CSV
    with a header, times in seconds, lengths in tokens, no texts.

        Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
        5,ChatGPT,472,18,490,Conversation log

    Other columns (`Session ID`, `Elapsed time`) are ignored. Rows without response tokens are failed requests; they are
    skipped. Raises `MalformedRow` with the line, `InvalidRequest` for a missing file.
    """
    with reading(path), path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        try:
            yield from _rows(reader, model)
        except csv.Error as error:
            raise MalformedRow(f"expected CSV, got {error}", line=reader.line_num + 1) from error
        except UnicodeDecodeError as error:
            raise not_utf8(path, error) from error


def _rows(reader: Iterator[list[str]], model: str | None) -> Iterator[Recorded]:
    header = next(reader, [])
    needed = [TIME, PROMPT, OUTPUT] + ([] if model is None else [MODEL])
    if missing := [name for name in needed if name not in header]:
        raise MalformedRow(f"expected columns {', '.join(needed)}, got no {', '.join(missing)}", line=1)
    column = {name: header.index(name) for name in needed}
    before = 0.0
    for row in reader:
        line: int = reader.line_num  # type: ignore[attr-defined]  # of csv's reader
        if not row:
            continue
        if len(row) != len(header):
            raise MalformedRow(f"expected {len(header)} fields, got {len(row)}", line=line)
        at = _number(row[column[TIME]], TIME, line)
        check_order(at, before, line)
        before = at
        prompt, output = (_tokens(row[column[name]], name, line) for name in (PROMPT, OUTPUT))
        if prompt and output and (model is None or row[column[MODEL]] == model):
            yield Recorded(at, prompt, output)


def _number(text: str, name: str, line: int) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise MalformedRow(f"{name}: expected a number of at least 0, got {text[:40]!r}", line=line)
    return value


def _tokens(text: str, name: str, line: int) -> int:
    if not (text.strip().isascii() and text.strip().isdigit()):
        raise MalformedRow(f"{name}: expected a number of tokens, got {text[:40]!r}", line=line)
    tokens = int(text[:20])
    if tokens > MAX_TOKENS:
        raise MalformedRow(f"{name}: expected at most {MAX_TOKENS} tokens, got {text[:40]}", line=line)
    return tokens


_Tokens = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: tuple[int, ...] = ()


def read_mooncake(path: Path) -> Iterator[Recorded]:
    """Yield the requests of a trace of Mooncake (Qin et al., FAST 2025): JSON lines, times in milliseconds, lengths in
    tokens, hashes of the prompt's blocks.

        {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}

    Prompts that begin with the same hashes begin with the same 512-token blocks. Raises `MalformedRow` with the line,
    `InvalidRequest` for a missing file.
    """
    decoder, before = msgspec.json.Decoder(_Line), 0.0
    with reading(path):
        for number, line in read_lines(path):
            try:
                found = decoder.decode(line)
            except JSON_ERRORS as error:
                raise not_json(error, number) from error
            at = found.timestamp / 1000
            check_order(at, before, number)
            before = at
            yield Recorded(at, found.input_length, found.output_length, found.hash_ids)


MAX_CONVERSATION = 1 << 24
"""Maximum bytes of a conversation. It bounds the memory that a file can take."""
HUMANS, MODELS = ("human", "user"), ("gpt", "assistant", "chatgpt")
"""Names of ShareGPT's speakers."""


class Conversation(NamedTuple):
    prompt: str
    answer: str


class _Turn(msgspec.Struct):
    speaker: str = msgspec.field(name="from")
    value: str


class _Record(msgspec.Struct):
    conversations: list[_Turn]


def read_sharegpt(path: Path, *, most: int = MAX_CONVERSATION) -> Iterator[Conversation]:
    """Yield ShareGPT's conversations, of about `most` bytes at most, without times: a JSON array of objects, as in its
    published file, or one object per line.

        [{"id": "x_0", "conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}]

    The first message is the prompt and the second the answer, as in FlexLLM's recipe and `vllm bench serve`.
    Conversations that do not begin with a human message and an answer are skipped. Raises `MalformedRow` with the file
    and the line (for an array, the element's number), `InvalidRequest` for a missing file.
    """
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
