"""A folder that other processes write to is heard of, also where the kernel tells nothing."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
from pathlib import Path

import pytest

from coserve.warmup.watch import watch_renames


def rename_into(folder: Path) -> None:
    (folder / "new").write_text("")
    (folder / "new").rename(folder / "found")


async def test_a_file_that_is_renamed_is_heard_of_at_once(tmp_path: Path) -> None:
    heard = asyncio.Event()
    with watch_renames(tmp_path, heard.set, look_every=3600.0):
        rename_into(tmp_path)
        await asyncio.wait_for(heard.wait(), 5.0)


class NoWatches:
    """libc, for a user who has as many instances, or watches, as may be."""

    def __init__(self, *, instances: bool) -> None:
        self._instances, self.descriptors = instances, list[int]()

    def inotify_init1(self, flags: int) -> int:
        if not self._instances:
            ctypes.set_errno(errno.EMFILE)
            return -1
        self.descriptors.append(os.eventfd(0, flags))
        return self.descriptors[-1]

    def inotify_add_watch(self, descriptor: int, path: bytes, mask: int) -> int:
        ctypes.set_errno(errno.ENOSPC)
        return -1


@pytest.mark.parametrize(("instances", "why"), [(False, errno.EMFILE), (True, errno.ENOSPC)])
async def test_where_no_watch_is_left_the_folder_is_looked_at_and_the_log_says_so(
    instances: bool, why: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    libc, heard = NoWatches(instances=instances), asyncio.Event()
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: libc)

    def look() -> None:
        if (tmp_path / "found").exists():
            heard.set()

    with watch_renames(tmp_path, look, look_every=0.01):
        rename_into(tmp_path)
        await asyncio.wait_for(heard.wait(), 5.0)
    assert f"cannot be watched, and is looked at every 0.01 s: {os.strerror(why)}" in caplog.text
    for descriptor in libc.descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


async def test_nobody_looks_after_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: NoWatches(instances=False))
    looks, looked = 0, asyncio.Event()

    def look() -> None:
        nonlocal looks
        looks += 1
        looked.set()

    with watch_renames(tmp_path, look, look_every=0.001):
        await asyncio.wait_for(looked.wait(), 5.0)
    before = looks
    await asyncio.sleep(0.02)
    assert looks == before
