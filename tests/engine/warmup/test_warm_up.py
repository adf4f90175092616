"""A warm-up with fake workers: each part is compiled once, and parts that fail, hang or crash are reported."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from coserve.engine.warmup import manifest
from coserve.engine.warmup.parts import Part, PartReport, Progress, WarmUpTask
from coserve.engine.warmup.warm_up import DIED, compile_parts
from tests.support.virtual_clock import run_virtual

PARTS = (Part("a", 4), Part("b", 4), Part("c", 4, frozenset({"a"})))
FIELDS = {"gpu": "H200"}
DONE = (PartReport(1, 2), PartReport(2, 2))
BROKEN = (PartReport(0, 1, "error", "broken"),)
FULL = (PartReport(0, 1, "memory", "full"),)
Reports = Sequence[PartReport | str]
Script = Callable[[str], Reports | Awaitable[Reports]]
"""What a worker reports of a part; a text: it hangs."""


class Scripted:
    """Implements `Worker`."""

    def __init__(self, folder: Path, script: Script, alive: set[Scripted], asked: list[str]) -> None:
        self._folder, self._script, self._alive, self._asked = folder, script, alive, asked
        self._left: list[PartReport | str] = []
        alive.add(self)

    async def run(self, part: str) -> None:
        self._asked.append(part)
        kernel = self._folder / "triton" / part / "kernel.cubin"
        kernel.parent.mkdir(parents=True, exist_ok=True)
        kernel.write_bytes(part.encode())
        reports = self._script(part)
        self._left = list(await reports if isinstance(reports, Awaitable) else reports)

    async def report(self) -> PartReport:
        await asyncio.sleep(0)
        found = self._left.pop(0)
        if isinstance(found, str):
            await asyncio.Event().wait()
        assert isinstance(found, PartReport)
        return found

    async def close(self) -> None:
        self._alive.discard(self)


class Told(list[Progress]):
    """All that a warm-up has reported."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = asyncio.Event()

    def add(self, progress: Progress) -> None:
        self.append(progress)
        self._changed.set()

    async def until(self, holds: Callable[[Progress], bool]) -> None:
        while not any(map(holds, self)):
            self._changed.clear()
            await self._changed.wait()


def begin(
    folder: Path, script: Script, shape: str = "8b", workers: int = 1
) -> tuple[asyncio.Task[None], Told, list[str]]:
    """A warm-up's task, what it reports, and the parts that its workers ran."""
    alive, asked, told = set[Scripted](), list[str](), Told()

    async def start() -> Scripted:
        return Scripted(folder, script, alive, asked)

    async def work() -> None:
        task = WarmUpTask(config="{}", folder=str(folder), fields=FIELDS, shape=shape, workers=workers)
        try:
            await compile_parts(task, PARTS, start, told.add, report_timeout=60.0)
        finally:
            assert not alive

    return asyncio.create_task(work()), told, asked


async def run(folder: Path, script: Script, workers: int = 2) -> tuple[list[Progress], list[str]]:
    working, told, asked = begin(folder, script, workers=workers)
    await working
    assert told[-1].ended
    assert told[-1].done == told[-1].total
    return told, asked


def complete(folder: Path, shape: str = "8b") -> list[str]:
    """What the next start finds."""
    return manifest.load(folder, FIELDS).parts.get(shape, [])


@pytest.mark.parametrize("workers", [1, 2, 5])
async def test_everything_is_done_once_and_found_at_the_next_start(tmp_path: Path, workers: int) -> None:
    told, asked = await run(tmp_path, lambda part: DONE, workers)
    assert sorted(asked) == ["a", "b", "c"]
    assert asked.index("a") < asked.index("c")
    assert complete(tmp_path) == ["a", "b", "c"]
    assert not told[-1].notes
    assert [one.done for one in told] == sorted(one.done for one in told)
    told, asked = await run(tmp_path, lambda part: DONE)
    assert not asked and len(told) == 1


async def test_what_an_interrupted_start_completed_is_kept(tmp_path: Path) -> None:
    def only_a(part: str) -> Reports:
        if part != "a":
            raise ZeroDivisionError
        return DONE

    with pytest.raises(ZeroDivisionError):
        await run(tmp_path, only_a, workers=1)
    assert complete(tmp_path) == ["a"]
    _, asked = await run(tmp_path, lambda part: DONE)
    assert sorted(asked) == ["b", "c"]


@pytest.mark.parametrize(
    ("reports", "why"), [((DIED,), "its process died"), (BROKEN, "broken"), (("hangs",), "no progress for 60 s")]
)
def test_a_part_that_fails_is_told_and_tried_again_at_the_next_start(
    tmp_path: Path, reports: Reports, why: str
) -> None:
    told, asked = run_virtual(run(tmp_path, lambda part: reports if part == "a" else DONE))
    assert told[-1].notes == [f"warm-up: a failed: {why}"]
    assert asked[-1] == "c", "what comes after it compiles what it misses"
    assert complete(tmp_path) == ["b", "c"]
    _, asked = run_virtual(run(tmp_path, lambda part: DONE))
    assert asked == ["a"]


async def test_a_part_that_this_base_cannot_have_is_told_and_not_tried_again(tmp_path: Path) -> None:
    unsupported = (PartReport(0, 1, "unsupported", "refused"),)
    told, _ = await run(tmp_path, lambda part: unsupported if part == "b" else DONE)
    assert told[-1].notes == ["warm-up: b failed: refused"]
    assert complete(tmp_path) == ["a", "b", "c"]


@pytest.mark.parametrize("reason", [FULL, (DIED,)])
async def test_a_worker_without_memory_gives_its_part_to_the_others(tmp_path: Path, reason: Reports) -> None:
    """Its process may have been killed because the machine ran out of memory."""
    scarce = [reason]
    told, asked = await run(tmp_path, lambda part: scarce.pop() if part == "a" and scarce else DONE)
    assert asked.count("a") == 2
    assert not told[-1].notes
    told, asked = await run(tmp_path / "alone", lambda part: reason if part == "a" else DONE, workers=1)
    assert sorted(asked) == ["a", "a", "b", "c"] and len(told[-1].notes) == 1


async def test_parts_whose_workers_run_out_of_memory_together_run_again(tmp_path: Path) -> None:
    together, tried = asyncio.Barrier(2), set[str]()

    async def first_fails(part: str) -> Reports:
        if part in tried or part == "c":
            return DONE
        tried.add(part)
        await together.wait()
        return FULL

    told, asked = await run(tmp_path, first_fails)
    assert sorted(asked) == ["a", "a", "b", "b", "c"]
    assert not told[-1].notes


async def test_without_a_process_each_part_says_why(tmp_path: Path) -> None:
    async def start() -> Scripted:
        raise OSError(12, "Cannot allocate memory")

    told = Told()
    await compile_parts(WarmUpTask("{}", str(tmp_path), FIELDS, "8b", 2), PARTS, start, told.add)
    assert told[-1].ended
    assert told[-1].notes == ["warm-up: a, b, c failed: no process: Cannot allocate memory"]


class Gate:
    """A script in which part c waits until the gate is open."""

    def __init__(self) -> None:
        self.open, self.reached = asyncio.Event(), asyncio.Event()

    async def __call__(self, part: str) -> Reports:
        if part == "c":
            self.reached.set()
            await self.open.wait()
        return DONE


async def test_two_daemons_over_one_folder_compile_each_part_once(tmp_path: Path) -> None:
    gate = Gate()
    first, _, _ = begin(tmp_path, gate)
    await gate.reached.wait()
    second, told, asked = begin(tmp_path, lambda part: DONE)
    await told.until(lambda progress: progress.waiting)
    gate.open.set()
    await asyncio.gather(first, second)
    assert not asked
    assert told[-1].ended and not told[-1].notes


async def test_a_daemon_that_is_stopped_keeps_no_lock(tmp_path: Path) -> None:
    gate = Gate()
    first, _, _ = begin(tmp_path, gate)
    await gate.reached.wait()
    second, told, _ = begin(tmp_path, lambda part: DONE)
    await told.until(lambda progress: progress.waiting)
    for daemon in (second, first):
        daemon.cancel()
        await asyncio.wait({daemon})
    third, told, asked = begin(tmp_path, lambda part: DONE)
    await third
    assert asked == ["c"]


async def test_a_complete_cache_is_used_while_another_daemon_fills_it_for_its_own_base(tmp_path: Path) -> None:
    await run(tmp_path, lambda part: DONE)
    gate = Gate()
    filling, _, _ = begin(tmp_path, gate, shape="70b")
    await gate.reached.wait()
    _, asked = await run(tmp_path, lambda part: DONE)
    assert not asked
    gate.open.set()
    await filling
    assert complete(tmp_path) == complete(tmp_path, "70b") == ["a", "b", "c"]


async def test_a_folder_that_cannot_be_locked_is_used_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    await run(tmp_path, lambda part: DONE)
    assert complete(tmp_path) == ["a", "b", "c"]
