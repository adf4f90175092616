"""Watches a folder for files that are renamed into it, with Linux's inotify: no polling."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

IN_MOVED_TO = 0x80


@contextmanager
def watch_renames(folder: Path, changed: Callable[[], None]) -> Iterator[None]:
    """Inside the block, `changed` is called on the event loop after a file was renamed into the folder by any process of
    this machine. Never called where there is no inotify."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "inotify_init1"):
        yield
        return
    descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:  # no instance is left to this user
        yield
        return

    def read() -> None:
        os.read(descriptor, 1 << 16)
        changed()

    loop = asyncio.get_running_loop()
    libc.inotify_add_watch(descriptor, os.fsencode(folder), IN_MOVED_TO)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
