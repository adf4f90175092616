"""A job's training and validation files as one corpus."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from coserve.core.cancellation import uncancelled_thread
from coserve.core.errors import CorpusError, EmptyCorpus, InvalidRequest
from coserve.data.corpus.columns import Columns
from coserve.data.corpus.conversion import is_json_lines
from coserve.state.durable import disk_errors


@asynccontextmanager
async def joined_rows(training: Path, validation: Path | None, staging: Path) -> AsyncIterator[tuple[Path, int]]:
    """Yield a file of both files' rows, and the number of its last rows that are for validation; it is deleted when the
    block ends. Errors in rows that the block raises then tell the line within the file that has it.

    Raises `InvalidRequest` unless both are JSON Lines, `EmptyCorpus`, `StorageError`.
    """
    if validation is None:
        yield training, 0
        return
    for path, field in ((training, "training_file"), (validation, "validation_file")):
        if not await asyncio.to_thread(is_json_lines, path, Columns()):
            raise InvalidRequest("expected JSON Lines beside another file", field=field)
    joined = staging / f"rows-{secrets.token_hex(8)}"
    try:
        lines = await uncancelled_thread(_append, training, joined)
        await uncancelled_thread(_append, validation, joined)
        rows = await uncancelled_thread(_count_rows, validation)
        if rows == 0:
            raise EmptyCorpus("expected rows to measure the loss on, got none", field="validation_file")
        try:
            yield joined, rows
        except CorpusError as error:
            if error.line is None or error.line <= lines:
                raise
            moved = error.moved(-lines)
            raise type(error)(f"validation_file: {moved.message}", field=error.field) from error
    finally:
        await uncancelled_thread(joined.unlink, missing_ok=True)


def _append(source: Path, target: Path) -> int:
    """Append a file, and the end of its last line; return its lines."""
    lines, last = 0, b"\n"
    with disk_errors(), source.open("rb") as rows, target.open("ab") as file:
        while block := rows.read(1 << 20):
            file.write(block)
            lines += block.count(b"\n")
            last = block
        if not last.endswith(b"\n"):
            file.write(b"\n")
            lines += 1
    return lines


def _count_rows(path: Path) -> int:
    """Return the file's lines that are not empty."""
    with disk_errors(), path.open("rb") as file:
        return sum(1 for line in file if line.strip())
