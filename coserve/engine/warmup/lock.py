"""The lock of a cache folder: only one warm-up uses it at a time; daemons that share it wait for each other."""

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
"""Seconds between two attempts."""


@asynccontextmanager
async def cache_lock(folder: Path, waits: Callable[[], None]) -> AsyncIterator[None]:
    """Context that holds an exclusive flock on the folder's file `lock`; the kernel frees it when the process ends.
    `waits` is called if another process holds it. On a file system without locks, everyone proceeds, with a warning in
    the log."""
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
