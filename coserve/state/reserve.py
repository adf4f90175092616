"""Space kept back on the disk for what must be written when the disk is full: what frees space, and how jobs end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SIZE = 4 << 20
"""Bytes: SQLite's log grows by a few pages of 4 KiB with each commit, and is emptied every 1000 pages."""
PIECE = 64 << 10
"""Bytes: the file's size is a multiple."""


class Reserve:
    """A file of `size` bytes, all of them allocated. Not for two threads at once."""

    def __init__(self, path: Path, size: int = SIZE) -> None:
        self._path, self._size = path, size
        self._held = 0

    def make(self) -> None:
        """Keep back as much as there is room for; a call where nothing is missing does nothing."""
        if self._held >= self._size:
            return
        disk = os.statvfs(self._path.parent)
        wanted = min(self._size, self._held + disk.f_bavail * disk.f_frsize // PIECE * PIECE)
        while wanted > self._held:
            try:
                self._allocate(wanted)
            except OSError:  # the space was taken meanwhile, or the file's own blocks need some of it
                wanted -= PIECE

    @contextmanager
    def released(self) -> Iterator[None]:
        """Inside, the space is free; afterwards what is left of it is kept back again."""
        self._held = 0
        self._path.unlink(missing_ok=True)
        try:
            yield
        finally:
            self.make()

    def _allocate(self, size: int) -> None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
        finally:
            os.close(descriptor)
        self._held = size
