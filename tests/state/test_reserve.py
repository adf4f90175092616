"""On a full disk what frees space is still written, into space that was kept back; what takes space is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from coserve.errors import StorageFull
from coserve.state.registry import Registry
from coserve.state.reserve import Reserve
from coserve.state.thread import RegistryThread
from coserve.types import JobState
from tests.support.records import make_adapter, make_job
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
        await thread(lambda r, n=n: r.add_adapter(make_adapter(f"a{n}")))
    await thread(lambda r: r.create_job(make_job()))
    fill(disk)
    with pytest.raises(StorageFull):
        for n in range(1000):  # its log may have room for some
            await thread(lambda r, n=n: r.create_job(make_job(f"more-{n}", adapter=f"more-{n}")))
    for n in range(6):
        fill(disk)
        await thread.freeing(lambda r, n=n: r.delete_adapter(f"a{n}"))
    assert (await thread.freeing(lambda r: r.set_state("job-1", JobState.CANCELLED))).state is JobState.CANCELLED
    await thread.close()


async def test_a_registry_opens_on_a_full_disk(disk: Path) -> None:
    thread = thread_on(disk)
    await thread(lambda r: r.add_adapter(make_adapter("old")))
    await thread.close()
    fill(disk)
    again = thread_on(disk)
    assert await again(lambda r: r.adapters()) != []
    await again.freeing(lambda r: r.delete_adapter("old"))
    assert await again(lambda r: r.adapters()) == []
    await again.close()


async def test_space_is_kept_back_again_once_there_is_some(disk: Path) -> None:
    thread = thread_on(disk)
    await thread(lambda r: r.add_adapter(make_adapter("old")))
    fill(disk)
    await thread.freeing(lambda r: r.delete_adapter("old"))
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
        await thread.freeing(change)
    assert len(calls) == 1
    await thread.close()
