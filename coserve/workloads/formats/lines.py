"""Reading of line-based files, and the record of a recorded trace."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from coserve.core.errors import InvalidRequest, MalformedRow

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
