"""Storage errors are retried, logged once, and raised only when the back-off has ended."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from coserve.core.errors import StorageBusy, StorageError, StorageFailed, StorageFull
from coserve.state.durable import disk_errors
from coserve.state.registry.database import database_errors
from coserve.state.registry.registry import Registry
from coserve.state.retries import Backoff, Retries
from coserve.state.thread import RegistryThread
from tests.support.records import make_job


class Clockless:
    """A sleep that takes no time and remembers how long it was to be."""

    def __init__(self) -> None:
        self.naps: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.naps.append(seconds)
        await asyncio.sleep(0)


class Flaky:
    """Work that fails `times` times."""

    def __init__(self, times: int, error: StorageError | None = None) -> None:
        self.times, self.error, self.calls = times, error or StorageBusy("no descriptors"), 0

    async def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return self.calls


def test_delays_double_up_to_the_longest_and_end_at_the_total() -> None:
    assert list(Backoff(first=1.0, longest=3.0, total=9.0).delays()) == [1.0, 2.0, 3.0, 3.0]
    endless = Backoff(first=1.0, longest=1.0).delays()
    assert [next(endless) for _ in range(5000)] == [1.0] * 5000


async def test_work_is_tried_until_it_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    sleep = Clockless()
    retries = Retries(Backoff(first=1.0, longest=2.0), sleep=sleep)
    assert await retries.run("the registry", Flaky(3)) == 4
    assert sleep.naps == [1.0, 2.0, 2.0]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert caplog.messages[-1] == "the registry: works again after 4 attempts"
    assert retries.notes == ()


async def test_the_last_error_is_raised_once_the_total_is_used_up(caplog: pytest.LogCaptureFixture) -> None:
    retries = Retries(Backoff(first=1.0, longest=1.0, total=2.0), sleep=Clockless())
    with pytest.raises(StorageFull):
        await retries.run("a write", Flaky(9, StorageFull("full")))
    assert retries.notes == ()
    assert caplog.messages[-1] == "a write: given up after 2 s"


def test_work_on_a_thread_is_told_of_in_the_same_way(caplog: pytest.LogCaptureFixture) -> None:
    class Stopped(Exception): ...

    caplog.set_level("INFO")
    naps: list[float] = []

    def wait(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 6:
            raise Stopped

    def flaky(times: int) -> Callable[[], str]:
        left = iter(range(times))

        def work() -> str:
            if next(left, None) is not None:
                raise StorageBusy("no descriptors")
            return "done"

        return work

    retries = Retries(Backoff(first=1.0, longest=1.0, total=3.0))
    assert retries.run_blocking("a start", flaky(2), wait) == "done"
    assert (naps, caplog.messages[-1]) == ([1.0, 1.0], "a start: works again after 3 attempts")
    with pytest.raises(StorageBusy):
        retries.run_blocking("a start", flaky(9), wait)
    assert (len(naps), caplog.messages[-1]) == (5, "a start: given up after 3 s")
    with pytest.raises(Stopped):
        retries.run_blocking("a start", flaky(9), wait)
    assert caplog.messages[-1] == "a start: no longer tried again"
    assert retries.notes == ()


async def test_errors_that_no_attempt_mends_are_raised_at_once() -> None:
    retries = Retries(Backoff(), errors=StorageBusy, sleep=Clockless())
    work = Flaky(1, StorageFull("full"))
    with pytest.raises(StorageFull):
        await retries.run("a write", work)
    assert work.calls == 1


async def test_many_that_fail_together_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    go, all_asleep = asyncio.Event(), asyncio.Barrier(51)

    async def sleep(_: float) -> None:
        await all_asleep.wait()
        await go.wait()

    retries = Retries(Backoff(), sleep=sleep)
    waiting = [asyncio.create_task(retries.run("the registry", Flaky(1))) for _ in range(50)]
    await all_asleep.wait()
    assert len(retries.notes) == 1
    go.set()
    assert await asyncio.gather(*waiting) == [2] * 50
    assert len(caplog.records) == 2


async def test_a_cancelled_wait_leaves_no_note() -> None:
    asleep = asyncio.Event()

    async def sleep(_: float) -> None:
        asleep.set()
        await asyncio.Event().wait()

    retries = Retries(Backoff(), sleep=sleep)
    task = asyncio.create_task(retries.run("the registry", Flaky(1)))
    await asleep.wait()
    assert retries.notes
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert retries.notes == ()


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        *((number, StorageBusy) for number in ("EMFILE", "ENFILE", "EAGAIN", "EINTR", "ENOMEM")),
        *((number, StorageFull) for number in ("ENOSPC", "EDQUOT")),
        *((number, StorageFailed) for number in ("EIO", "EROFS")),
    ],
)
def test_errors_of_the_machine_have_their_type(number: str, kind: type[StorageError]) -> None:
    code = getattr(errno, number)
    with pytest.raises(kind), disk_errors():
        raise OSError(code, os.strerror(code))


@pytest.mark.parametrize("number", ["ENOENT", "ELOOP", "EACCES"])
def test_errors_of_a_file_stay(number: str) -> None:
    with pytest.raises(OSError) as caught, disk_errors():
        raise OSError(getattr(errno, number), "no")
    assert caught.value.errno == getattr(errno, number)


def test_a_locked_database_is_busy(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "file", isolation_level=None) as one:
        one.execute("CREATE TABLE t (x)")
        one.execute("BEGIN IMMEDIATE")
        other = sqlite3.connect(tmp_path / "file", timeout=0, isolation_level=None)
        with pytest.raises(StorageBusy), database_errors():
            other.execute("BEGIN IMMEDIATE")


# ---- a registry that another process has locked


class Lock:
    """Another process's lock on the registry."""

    def __init__(self, path: Path, how: str = "IMMEDIATE") -> None:
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute(f"BEGIN {how}")

    def release(self) -> None:
        self._db.execute("ROLLBACK")
        self._db.close()


async def test_a_write_waits_for_a_lock_and_reads_go_on(tmp_path: Path) -> None:
    path, asleep, go = tmp_path / "registry.sqlite3", threading.Event(), asyncio.Event()

    async def sleep(_: float) -> None:
        asleep.set()
        await go.wait()

    thread = RegistryThread(lambda: Registry(path), sleep=sleep)
    assert await thread(lambda registry: registry.jobs()) == []
    lock = Lock(path)
    writing = asyncio.create_task(thread(lambda registry: registry.create_job(make_job())))
    await asyncio.to_thread(asleep.wait)
    assert await thread(lambda registry: registry.jobs()) == []
    assert "registry" in thread.notes[0]
    lock.release()
    go.set()
    assert (await writing).spec.id == "job-1"
    assert [job.spec.id for job in await thread(lambda registry: registry.jobs())] == ["job-1"]
    assert thread.notes == ()
    await thread.close()


async def test_a_write_that_waits_too_long_is_refused_and_has_changed_nothing(tmp_path: Path) -> None:
    path = tmp_path / "registry.sqlite3"
    thread = RegistryThread(lambda: Registry(path), backoff=Backoff(first=1.0, total=2.0), sleep=Clockless())
    await thread(lambda registry: registry.jobs())
    lock = Lock(path)
    with pytest.raises(StorageBusy):
        await thread(lambda registry: registry.create_job(make_job()))
    lock.release()
    assert await thread(lambda registry: registry.jobs()) == []
    await thread(lambda registry: registry.create_job(make_job()))
    await thread.close()


async def test_a_registry_that_is_locked_while_it_opens_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "registry.sqlite3"
    lock = Lock(path, "EXCLUSIVE")

    async def sleep(_: float) -> None:
        lock.release()

    thread = RegistryThread(lambda: Registry(path), sleep=sleep)
    assert await thread(lambda registry: registry.jobs()) == []
    await thread.close()
