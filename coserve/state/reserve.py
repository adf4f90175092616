"""Space kept back on the disk for what must be written when the disk is full: what frees space, and how jobs end."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coserve.state.durable import FULL

log = logging.getLogger(__name__)

SIZE = 4 << 20
"""Bytes: SQLite's log grows by a few pages of 4 KiB with each commit, and is emptied every 1000 pages."""
PIECE = 64 << 10
"""Bytes: the file's size is a multiple."""


class Reserve:
    """A file of `size` bytes, all of them allocated. Not for two threads at once.

    What the disk refuses for another reason than a lack of space raises nothing: the reserve only helps other writes. It is
    logged once, and stands in `notes` until it works again.
    """

    def __init__(self, path: Path, size: int = SIZE) -> None:
        self._path, self._size = path, size
        self._held = 0
        self._problem: str | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Why no space is kept back, if the disk refuses it; for /health. May be read on any thread."""
        problem = self._problem
        return () if problem is None else (f"no space is kept back for a full disk: {problem}",)

    def make(self) -> None:
        """Keep back as much as there is room for; a call where nothing is missing does nothing."""
        if self._held >= self._size:
            return
        try:
            self._fill()
        except OSError as error:
            self._tell(error.strerror or str(error))
        else:
            self._tell(None)

    @contextmanager
    def released(self) -> Iterator[None]:
        """Inside, the space is free; afterwards what is left of it is kept back again."""
        self._held = 0
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:  # without the space, what is to be done inside may still succeed
            self._tell(error.strerror or str(error))
        try:
            yield
        finally:
            self.make()

    def _fill(self) -> None:
        disk = os.statvfs(self._path.parent)
        wanted = min(self._size, self._held + disk.f_bavail * disk.f_frsize // PIECE * PIECE)
        while wanted > self._held:
            try:
                self._allocate(wanted)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                wanted -= PIECE  # the space was taken meanwhile, or the file's own blocks need some of it

    def _allocate(self, size: int) -> None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
        finally:
            os.close(descriptor)
        self._held = size

    def _tell(self, problem: str | None) -> None:
        if problem == self._problem:
            return
        if problem is None:
            log.info("space is kept back for a full disk again")
        elif self._problem is None:
            log.warning("no space is kept back for a full disk: %s; tried again with each change", problem)
        self._problem = problem
