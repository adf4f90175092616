"""The lock of a cache folder: one warm-up at a time uses it. Daemons that share the folder take turns."""

from __future__ import annotations

import asyncio
import fcntl
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)

AGAIN = 0.5
"""Seconds between two tries."""


@asynccontextmanager
async def cache_lock(folder: Path, waits: Callable[[], None]) -> AsyncIterator[None]:
    """An exclusive flock on the folder's file `lock` inside the block; the kernel frees it when the process ends.
    `waits` is called if another process holds it. Where the file system has no locks, everyone gets it, with a warning
    in the log."""
    with _opened(folder) as file:
        told = False
        while file is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    waits()
                told = True
                await asyncio.sleep(AGAIN)
            except OSError as error:
                _warn(error)
                break
        yield


def _opened(folder: Path) -> IO[bytes] | nullcontext[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / "lock").open("ab")
    except OSError as error:
        _warn(error)
        return nullcontext()


def _warn(error: OSError) -> None:
    log.warning("warm-up: the cache folder cannot be locked: %s", error.strerror)
