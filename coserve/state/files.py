"""Uploaded files: `files/<id>/` holds the content and its record; a folder appears once both are durable."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from coserve.core.access.principal import DEFAULT_PROJECT, principal
from coserve.core.errors import InvalidRequest, NotFound, StorageError
from coserve.core.types import Wire
from coserve.core.validation import decode_json
from coserve.state.durable import read_errors, remove_dir, replace_dir

log = logging.getLogger(__name__)

CONTENT, RECORD = "content", "record.json"


class Stored(Wire, frozen=True, kw_only=True):
    """A record of something that has a folder with its id as name. Times: seconds since the epoch."""

    id: str
    created_at: float
    project: str = DEFAULT_PROJECT


class FileRecord(Stored, frozen=True, kw_only=True):
    """An uploaded file."""

    filename: str
    purpose: str
    bytes: int


S = TypeVar("S", bound=Stored)


class RecordStore(Generic[S]):
    """The records, `RECORD`, of all folders below `folder`. `load` does disk work: call it on a thread; the rest reads
    the records in memory."""

    def __init__(self, folder: Path, kind: type[S], noun: str) -> None:
        """`noun`: name of one record in error messages, such as `file`."""
        self._folder, self._kind, self._noun = folder, kind, noun
        self._records: dict[str, S] = {}
        """By id. Threads add and remove records, so that only a copy may be iterated."""

    def load(self) -> None:
        """Read all records; those that were damaged, or whose content is not whole, are logged and left out. Raises
        `StorageError` if the machine cannot read one now."""
        found = []
        with read_errors():
            entries = list(self._folder.iterdir()) if self._folder.is_dir() else []
        for entry in entries:
            if entry.name.startswith("."):
                continue
            try:
                with read_errors():
                    record = self._read(entry)
            except StorageError as error:
                raise type(error)(f"{entry.name} cannot be read now: {error.message}") from error
            if record is None or record.id != entry.name:
                log.warning("%s is not listed: it was damaged from outside", entry.name)
            else:
                found.append(record)
        self._records = {record.id: record for record in sorted(found, key=lambda each: each.created_at)}

    def _read(self, folder: Path) -> S | None:
        """Return the record of a folder; None if it was damaged."""
        try:
            return decode_json((folder / RECORD).read_bytes(), self._kind)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, msgspec.DecodeError):
            return None

    def get(self, id: str, field: str = "id") -> S:
        """Return a record. Raises `NotFound` for `field`, also for one that the principal does not see."""
        if (record := self._records.get(id)) is None or not principal().sees(record.project):
            raise NotFound(f"no {self._noun} {id[:80]!r}", field=field)
        return record

    def all(self) -> list[S]:
        """Return the records that the principal sees, oldest first."""
        return [record for record in [*self._records.values()] if principal().sees(record.project)]


class FileStore(RecordStore[FileRecord]):
    """All uploaded files. `load`, `add` and `remove` do disk work: call them on a thread, one at a time for each file.
    `clock` returns seconds since the epoch."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        super().__init__(folder, FileRecord, "file")
        self._clock = clock

    def _read(self, folder: Path) -> FileRecord | None:
        record, content = super()._read(folder), folder / CONTENT
        whole = record is not None and content.is_file() and content.stat().st_size == record.bytes
        return record if whole else None

    def add(self, source: Path, filename: str, purpose: str) -> FileRecord:
        """Move `source`, on the same file system, into the store; durable when this returns. Raises `StorageError`."""
        with read_errors():
            size = source.stat().st_size
        record = FileRecord(
            id=f"file-{secrets.token_hex(12)}",
            filename=filename,
            purpose=purpose,
            bytes=size,
            created_at=self._clock(),
            project=principal().project,
        )
        with replace_dir(self._folder / record.id, point="file") as target:
            source.rename(target / CONTENT)
            (target / RECORD).write_bytes(msgspec.json.encode(record))
        self._records[record.id] = record
        return record

    def content(self, id: str, purpose: str | None = None, field: str = "id") -> Path:
        """Return the path of a file's content. Raises `NotFound` for `field`, and `InvalidRequest` if the file was
        uploaded for another purpose than `purpose`."""
        record = self.get(id, field)
        if purpose not in (None, record.purpose):
            raise InvalidRequest(f"expected a file with purpose {purpose}, got {record.purpose}", field=field)
        return self._folder / record.id / CONTENT

    def bytes_of(self, project: str) -> int:
        return sum(record.bytes for record in [*self._records.values()] if record.project == project)

    def remove(self, id: str) -> None:
        """Delete a file; durable when this returns. Raises `NotFound`, `StorageError`."""
        remove_dir(self._folder / self.get(id).id)
        self._records.pop(id, None)
