"""Rows for validation from a file of their own: JSON Lines at the end of a corpus of JSON Lines."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coserve.core.errors import CorpusError


def append_lines(source: Path, target: Path) -> int:
    """Append a file, and the end of its last line; return its lines."""
    lines, last = 0, b"\n"
    with source.open("rb") as rows, target.open("ab") as file:
        rows.seek(len(codecs.BOM_UTF8) if rows.read(3) == codecs.BOM_UTF8 else 0)  # it would stand amid the rows
        while block := rows.read(1 << 20):
            file.write(block)
            lines += block.count(b"\n")
            last = block
        if not last.endswith(b"\n"):
            file.write(b"\n")
            lines += 1
    return lines


def count_rows(path: Path) -> int:
    """Return the file's lines that are not empty."""
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


@contextmanager
def own_lines(lines: int, name: str) -> Iterator[None]:
    """Errors in rows after the first `lines` lines tell the line within the second file, called `name`."""
    try:
        yield
    except CorpusError as error:
        if error.line is None or error.line <= lines:
            raise
        moved = error.moved(-lines)
        raise type(error)(f"{name}: {moved.message}", field=error.field) from error
