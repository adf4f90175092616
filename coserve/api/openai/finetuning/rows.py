"""A job's training and validation files as one corpus."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from coserve.core.cancellation import uncancelled_thread
from coserve.core.errors import EmptyCorpus, InvalidRequest
from coserve.core.training.held_rows import append_lines, count_rows, own_lines
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
        with disk_errors():
            lines = await uncancelled_thread(append_lines, training, joined)
            await uncancelled_thread(append_lines, validation, joined)
            rows = await uncancelled_thread(count_rows, validation)
        if rows == 0:
            raise EmptyCorpus("expected rows to measure the loss on, got none", field="validation_file")
        with own_lines(lines, "validation_file"):
            yield joined, rows
    finally:
        await uncancelled_thread(joined.unlink, missing_ok=True)
