"""The lock of a cache folder: one warm-up at a time writes to it. Daemons that share the folder take turns."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import threading
from pathlib import Path
from typing import BinaryIO

log = logging.getLogger(__name__)


class CacheLock:
    """An exclusive flock on the file `lock` of the folder, held until `close`, or until the process ends.

    Where the file system has no locks, everyone gets the lock at once, with a warning in the log.
    """

    def __init__(self, folder: Path) -> None:
        self._file: BinaryIO | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / "lock").open("ab")
        except OSError as error:
            self._warn(error)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def acquire_now(self) -> bool:
        """False if another process holds the lock."""
        try:
            if self._file is not None:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            self._warn(error)
        return True

    async def acquire(self) -> None:
        """Wait until no other process holds the lock."""
        assert self._file is not None, "expected a file that another process has locked"
        loop, acquired = asyncio.get_running_loop(), asyncio.Event()

        def wait(descriptor: int) -> None:
            """On a daemon thread, which a process that ends does not wait for."""
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                self._warn(error)
            finally:
                os.close(
                    descriptor
                )  # the lock stays with `_file`, which shares the open file, or goes if that was closed
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(acquired.set)

        threading.Thread(target=wait, args=(os.dup(self._file.fileno()),), name="cache-lock", daemon=True).start()
        await acquired.wait()

    def _warn(self, error: OSError) -> None:
        log.warning("warm-up: the cache folder cannot be locked: %s", error.strerror)
