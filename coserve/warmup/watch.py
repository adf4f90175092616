"""Watches a folder for files that are renamed into it, with Linux's inotify: no polling where it works."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

IN_MOVED_TO = 0x80
LOOK_EVERY = 5.0
"""Seconds between two looks where the kernel tells nothing: a user's watches are used up, or there is no inotify."""


@contextmanager
def watch_renames(folder: Path, changed: Callable[[], None], *, look_every: float = LOOK_EVERY) -> Iterator[None]:
    """Inside the block, `changed` is called on the event loop after a file was renamed into the folder by any process of
    this machine; where the kernel does not tell of it, every `look_every` seconds."""
    try:
        descriptor = _watch(folder)
    except OSError as error:
        log.warning("%s cannot be watched, and is looked at every %g s: %s", folder, look_every, error.strerror)
        with _looking(changed, look_every):
            yield
        return

    def read() -> None:
        os.read(descriptor, 1 << 16)
        changed()

    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _watch(folder: Path) -> int:
    """A descriptor that can be read after each rename. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "inotify_init1"):
        raise OSError(0, "there is no inotify")
    descriptor = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if descriptor < 0:
        raise _failure()
    if libc.inotify_add_watch(descriptor, os.fsencode(folder), IN_MOVED_TO) < 0:
        error = _failure()
        os.close(descriptor)
        raise error
    return descriptor


def _failure() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


@contextmanager
def _looking(look: Callable[[], None], every: float) -> Iterator[None]:
    async def again_and_again() -> None:
        while True:
            await asyncio.sleep(every)
            look()

    task = asyncio.create_task(again_and_again())
    try:
        yield
    finally:
        task.cancel()
