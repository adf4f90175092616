"""The lock of a cache folder: one warm-up at a time writes to it. Daemons that share the folder take turns."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import threading
from io import FileIO
from pathlib import Path

log = logging.getLogger(__name__)


class CacheLock:
    """An exclusive flock on the file `lock` of the folder, held until `close`, or until the process ends.

    The file's content is the holder's token. Where the file system has no locks, everyone gets the lock at once, with a warning
    in the log.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lock"
        self._file: FileIO | None = None
        self.token = secrets.token_hex(8)
        """Of this lock, for what its holder writes."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            self._warn(error)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def holder(self) -> str | None:
        """The token of the lock's last holder; None if it is not known."""
        try:
            return self._path.read_text() or None
        except (OSError, UnicodeDecodeError):
            return None

    def acquire_now(self) -> bool:
        """False if another process holds the lock."""
        try:
            if self._file is not None:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            self._warn(error)
        self._name_holder()
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
        self._name_holder()

    def _name_holder(self) -> None:
        if self._file is not None:
            try:
                self._file.truncate(0)
                self._file.write(self.token.encode())
            except OSError as error:
                log.warning("warm-up: the lock of the cache folder cannot be written: %s", error.strerror)

    def _warn(self, error: OSError) -> None:
        log.warning("warm-up: the cache folder cannot be locked: %s", error.strerror)
