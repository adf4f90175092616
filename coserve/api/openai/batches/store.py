"""Batches of requests: `batches/<id>/` holds the record, and the results as they come.

A result is one line, durable before its request counts as done, so that a batch goes on after a crash where it was.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from coserve.core.errors import NotFound
from coserve.core.types import Wire
from coserve.state.durable import replace_dir, write_file
from coserve.state.files import RECORD, RecordStore, Stored

INPUT, OUTPUT, ERRORS = "input.jsonl", "output.jsonl", "errors.jsonl"

BatchStatus = Literal["validating", "failed", "in_progress", "finalizing", "completed", "cancelling", "cancelled"]
ENDED: tuple[BatchStatus, ...] = ("failed", "completed", "cancelled")


class BatchProblem(Wire, frozen=True):
    """Why a batch's file was refused. `line`: counted from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchRecord(Stored, frozen=True, kw_only=True):
    """A batch of requests."""

    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, Any] | None
    status: BatchStatus = "validating"
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    problems: list[BatchProblem] = []
    in_progress_at: float | None = None
    cancelling_at: float | None = None
    finalizing_at: float | None = None
    ended_at: float | None = None

    @property
    def ended(self) -> bool:
        return self.status in ENDED


class BatchStore(RecordStore[BatchRecord]):
    """All batches. `load`, `add` and `save` do disk work: call them on a thread, one at a time for each batch."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, BatchRecord, "batch")

    def add(self, record: BatchRecord, content: Path) -> None:
        """Store a new batch. Until it has ended, it keeps a hard link to its input file `content`, which may be deleted
        meanwhile. Durable when this returns. Raises `NotFound` if it was deleted already, `StorageError`."""
        with replace_dir(self._folder / record.id, point="batch") as target:
            try:
                os.link(content, target / INPUT)
            except FileNotFoundError:
                raise NotFound(f"no file {record.input_file_id}", field="input_file_id") from None
            (target / RECORD).write_bytes(msgspec.json.encode(record))
        self._records[record.id] = record

    def save(self, record: BatchRecord) -> None:
        """Replace a batch's record; durable when this returns. Raises `StorageError`."""
        write_file(self._folder / record.id / RECORD, msgspec.json.encode(record), point="batch")
        if record.ended:
            with suppress(OSError):  # a file that stays only takes space
                self.input(record.id).unlink(missing_ok=True)
        self._records[record.id] = record

    def count(self, id: str, *, completed: int = 0, failed: int = 0) -> None:
        """Count results that were written; after a start they are counted from the files."""
        record = self.get(id)
        self._records[id] = msgspec.structs.replace(
            record, completed=record.completed + completed, failed=record.failed + failed
        )

    def input(self, id: str) -> Path:
        """Return the path of the requests of a batch that has not ended."""
        return self._folder / id / INPUT

    def results(self, id: str, name: str) -> Path:
        """Return the path of a batch's `OUTPUT` or `ERRORS`, an `ItemLog`; it may not exist."""
        return self._folder / id / name
