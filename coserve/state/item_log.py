"""A file of JSON lines that grows item by item: what was appended survives a crash."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from coserve.core.validation import decode_json
from coserve.state.durable import fsync_path, read_errors, write_errors

log = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)


class ItemLog(Generic[T]):
    """Items of one type in a file. Raises `StorageError`."""

    def __init__(self, path: Path, kind: type[T]) -> None:
        self._path, self._kind = path, kind

    def read(self) -> list[T]:
        """Return the items. An unfinished line at the end, left by a crash, is removed from the file, and so is what
        follows a line that was damaged from outside: it is made again."""
        with read_errors():
            try:
                content = self._path.read_bytes()
            except FileNotFoundError:
                return []
        items, whole = list[T](), 0
        for line in content[: content.rfind(b"\n") + 1].splitlines(keepends=True):
            try:
                items.append(decode_json(line, self._kind))
            except msgspec.DecodeError:
                log.warning("%s was damaged from outside: it is kept up to item %d", self._path, len(items))
                break
            whole += len(line)
        if whole < len(content):
            with write_errors():
                os.truncate(self._path, whole)
        return items

    def append(self, *items: T) -> None:
        """Add items; they are durable when this returns. From one thread at a time."""
        new = not self._path.exists()
        with write_errors():
            with self._path.open("ab") as file:
                file.write(b"".join(msgspec.json.encode(item) + b"\n" for item in items))
                file.flush()
                os.fsync(file.fileno())
            if new:
                fsync_path(self._path.parent)
