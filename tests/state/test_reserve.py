"""On a full disk what frees space is still written, into space that was kept back; what takes space is refused."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from coserve.core.errors import StorageFull
from coserve.core.training.jobs import JobState
from coserve.state.registry.registry import Registry
from coserve.state.reserve import BLOCK, Reserve
from coserve.state.thread import RegistryThread
from tests.support.records import import_adapter, make_adapter, make_job
from tests.support.small_disk import fill, small_disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 3 << 20) as disk:
        yield disk


def thread_on(disk: Path) -> RegistryThread:
    return RegistryThread(lambda: Registry(disk / "registry.sqlite3"), reserve=Reserve(disk / "reserve", 1 << 20))


async def test_what_frees_space_is_written_on_a_full_disk(disk: Path) -> None:
    thread = thread_on(disk)
    for n in range(6):
        await thread(lambda r, n=n: import_adapter(r, make_adapter(f"a{n}")))
    await thread(lambda r: r.create_job(make_job()))
    fill(disk)
    with pytest.raises(StorageFull):
        for n in range(1000):  # its log may have room for some
            await thread(lambda r, n=n: r.create_job(make_job(f"more-{n}", adapter=f"more-{n}")))
    for n in range(6):
        fill(disk)
        await thread.with_reserve(lambda r, n=n: r.delete_adapter(f"a{n}"))
    assert (await thread.with_reserve(lambda r: r.set_state("job-1", JobState.CANCELLED))).state is JobState.CANCELLED
    await thread.close()


async def test_a_registry_opens_on_a_full_disk(disk: Path) -> None:
    thread = thread_on(disk)
    await thread(lambda r: import_adapter(r, make_adapter("old")))
    await thread.close()
    fill(disk)
    again = thread_on(disk)
    assert await again(lambda r: r.adapters()) != []
    await again.with_reserve(lambda r: r.delete_adapter("old"))
    assert await again(lambda r: r.adapters()) == []
    await again.close()


async def test_space_is_kept_back_again_once_there_is_some(disk: Path) -> None:
    thread = thread_on(disk)
    await thread(lambda r: import_adapter(r, make_adapter("old")))
    fill(disk)
    await thread.with_reserve(lambda r: r.delete_adapter("old"))
    (disk / "filler").unlink()
    await thread(lambda r: r.adapters())
    assert (disk / "reserve").stat().st_size == 1 << 20
    await thread.close()


async def test_a_change_that_is_refused_for_another_reason_is_not_repeated(disk: Path) -> None:
    thread, calls = thread_on(disk), []

    def change(registry: Registry) -> None:
        calls.append(registry)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await thread.with_reserve(change)
    assert len(calls) == 1
    await thread.close()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO, errno.EMFILE])
async def test_a_disk_that_refuses_the_reserve_is_told_once_and_costs_no_change(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries, allocate = [], os.posix_fallocate

    def refuse(*args: int) -> None:
        tries.append(args)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    thread = RegistryThread(
        lambda: Registry(tmp_path / "registry.sqlite3"), reserve=Reserve(tmp_path / "reserve", 1 << 20)
    )
    for n in range(3):
        await thread(lambda r, n=n: import_adapter(r, make_adapter(f"a{n}")))
    await thread.with_reserve(lambda r: r.delete_adapter("a0"))
    assert len(await thread(lambda r: r.adapters())) == 2
    assert len(tries) == 5, "one attempt a call"
    assert [os.strerror(number) in record.message for record in caplog.records] == [True]
    assert os.strerror(number) in thread.notes[0]
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    await thread(lambda r: r.adapters())
    assert thread.notes == ()
    assert (tmp_path / "reserve").stat().st_size == 1 << 20
    await thread.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_lack_of_space_makes_the_reserve_smaller(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    allocate = os.posix_fallocate

    def refuse(file: int, start: int, size: int) -> None:
        if size > 2 * BLOCK:
            raise OSError(number, os.strerror(number))
        allocate(file, start, size)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    reserve = Reserve(tmp_path / "reserve", 8 * BLOCK)
    reserve.refill()
    assert (tmp_path / "reserve").stat().st_size == 2 * BLOCK
    assert reserve.notes == () and not caplog.records


async def test_a_committed_change_stays_one_though_the_reserve_cannot_be_kept_back_again(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = thread_on(disk)
    await thread(lambda r: import_adapter(r, make_adapter("old")))
    fill(disk)

    def refuse(path: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def change(registry: Registry) -> None:
        if not calls:
            calls.append("full")
            raise StorageFull("the disk is full")
        registry.delete_adapter("old")
        monkeypatch.setattr(os, "statvfs", refuse)

    calls: list[str] = []
    await thread.with_reserve(change)
    assert await thread(lambda r: r.adapters()) == []
    await thread.close()
