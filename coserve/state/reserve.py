"""Disk space reserved for registry writes that must succeed on a full disk: deletions and the ends of jobs."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coserve.state.durable import FULL

log = logging.getLogger(__name__)

SIZE = 4 << 20
"""Bytes. SQLite's log grows by a few pages of 4 KiB with each commit, and is reset every 1000 pages."""
BLOCK = 64 << 10
"""The file's size is a multiple of this many bytes."""


class Reserve:
    """A file of `size` allocated bytes. Not thread-safe.

    Disk errors other than a lack of space are not raised, since the reserve only helps other writes. They are logged
    once and shown in `notes` until the reserve works again.
    """

    def __init__(self, path: Path, size: int = SIZE) -> None:
        self._path, self._size = path, size
        self._held = 0
        self._problem: str | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Why no space is reserved, if the disk refuses it; for /health. May be read on any thread."""
        problem = self._problem
        return () if problem is None else (f"no space is kept back for a full disk: {problem}",)

    def refill(self) -> None:
        """Allocate as much of the file as the disk allows."""
        if self._held >= self._size:
            return
        try:
            self._grow()
        except OSError as error:
            self._report(error.strerror or str(error))
        else:
            self._report(None)

    @contextmanager
    def released(self) -> Iterator[None]:
        """Free the space inside the block; allocate it again afterwards, as far as possible."""
        self._held = 0
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:  # the block may still succeed without the space
            self._report(error.strerror or str(error))
        try:
            yield
        finally:
            self.refill()

    def _grow(self) -> None:
        disk = os.statvfs(self._path.parent)
        wanted = min(self._size, self._held + disk.f_bavail * disk.f_frsize // BLOCK * BLOCK)
        while wanted > self._held:
            try:
                self._allocate(wanted)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                wanted -= BLOCK  # another file took the space, or metadata of this one needs some of it

    def _allocate(self, size: int) -> None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
        finally:
            os.close(descriptor)
        self._held = size

    def _report(self, problem: str | None) -> None:
        if problem == self._problem:
            return
        if problem is None:
            log.info("space is kept back for a full disk again")
        elif self._problem is None:
            log.warning("no space is kept back for a full disk: %s; tried again with each change", problem)
        self._problem = problem
