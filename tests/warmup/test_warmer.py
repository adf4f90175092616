"""A warm-up with fake workers: parts that fail, hang or crash are reported, and a suspect cache is built again once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from coserve.warmup.lock import CacheLock
from coserve.warmup.manifest import Manifest, load_manifest, save_manifest
from coserve.warmup.messages import PartReport, Progress, WarmUpTask
from coserve.warmup.parts import Part
from coserve.warmup.warmer import warm

PARTS = (Part("a", 4), Part("b", 4), Part("c", 4, frozenset({"a"})))
FIELDS = {"gpu": "H200"}
DONE = (PartReport(1, 2), PartReport(2, 2))
Reports = Sequence[PartReport | str | None]
Script = Callable[[str], Reports | Awaitable[Reports]]
"""What a worker reports of a part: None is its death, a text that it hangs."""


class Scripted:
    """Implements `worker_pool.Worker`."""

    def __init__(self, folder: Path, script: Script, alive: set[Scripted], asked: list[str]) -> None:
        self._folder, self._script, self._alive, self._asked = folder, script, alive, asked
        self._part = ""
        self._left: list[PartReport | str | None] | None = None
        alive.add(self)

    def run_part(self, part: str) -> None:
        self._asked.append(part)
        self._part, self._left = part, None
        kernel = self._folder / "triton" / part / "kernel.cubin"
        kernel.parent.mkdir(parents=True, exist_ok=True)
        kernel.write_bytes(part.encode())

    async def next_report(self) -> PartReport | None:
        if self._left is None:
            reports = self._script(self._part)
            self._left = list(await reports if isinstance(reports, Awaitable) else reports)
        await asyncio.sleep(0)
        found = self._left.pop(0)
        if isinstance(found, str):
            await asyncio.Event().wait()
        return found if isinstance(found, PartReport) else None

    async def close(self) -> None:
        self._alive.discard(self)


async def run(
    folder: Path, script: Script, workers: int = 2, report_timeout: float = 60.0
) -> tuple[list[Progress], list[str]]:
    """All progress that was reported, and the parts that workers ran. Asserts that no worker is left."""
    alive, asked, told = set[Scripted](), list[str](), list[Progress]()

    async def start() -> Scripted:
        return Scripted(folder, script, alive, asked)

    task = WarmUpTask(config="{}", folder=str(folder), fields=FIELDS, shape="8b", workers=workers)
    await warm(task, PARTS, start, told.append, report_timeout=report_timeout)
    assert not alive
    assert told[-1].ended
    assert told[-1].done == told[-1].total
    return told, asked


@pytest.mark.parametrize("workers", [1, 2, 5])
async def test_everything_is_done_once_and_found_at_the_next_start(tmp_path: Path, workers: int) -> None:
    told, asked = await run(tmp_path, lambda part: DONE, workers)
    assert sorted(asked) == ["a", "b", "c"]
    assert asked.index("a") < asked.index("c")
    assert told[-1].complete == ["a", "b", "c"]
    assert not told[-1].notes
    assert [one.done for one in told] == sorted(one.done for one in told)
    told, asked = await run(tmp_path, lambda part: DONE)
    assert not asked
    assert told[-1].complete == ["a", "b", "c"]


async def test_a_damaged_file_is_not_trusted(tmp_path: Path) -> None:
    await run(tmp_path, lambda part: DONE)
    (tmp_path / "triton" / "a" / "kernel.cubin").write_bytes(b"?")
    _, asked = await run(tmp_path, lambda part: DONE)
    assert sorted(asked) == ["a", "b", "c"]


async def test_what_an_interrupted_start_completed_is_kept(tmp_path: Path) -> None:
    def only_a(part: str) -> Sequence[PartReport]:
        if part != "a":
            raise ZeroDivisionError
        return DONE

    with pytest.raises(ZeroDivisionError):
        await run(tmp_path, only_a, workers=1)
    assert load_manifest(tmp_path, FIELDS).parts == {"8b": ["a"]}
    _, asked = await run(tmp_path, lambda part: DONE)
    assert sorted(asked) == ["b", "c"]


@pytest.mark.parametrize(
    ("reports", "why"),
    [((None,), "died"), ((PartReport(0, 1, "error", "broken"),), "broken"), (("hangs",), "no progress")],
)
async def test_a_part_that_fails_is_told_and_the_others_are_done(
    tmp_path: Path, reports: tuple[PartReport | str | None, ...], why: str
) -> None:
    told, _ = await run(tmp_path, lambda part: reports if part == "a" else DONE, report_timeout=0.01)
    assert told[-1].complete == ["b"]
    assert {note.split(":")[1].strip() for note in told[-1].notes} == {"a failed", "c failed"}
    assert all(why in note for note in told[-1].notes)
    assert load_manifest(tmp_path, FIELDS).parts == {"8b": ["b"]}


async def test_a_cache_that_a_part_fails_over_is_made_anew_once(tmp_path: Path) -> None:
    await run(tmp_path, lambda part: DONE if part != "b" else (PartReport(0, 1, "unsupported", "no"),))
    kernel = tmp_path / "triton" / "old" / "kernel.cubin"
    kernel.parent.mkdir()
    kernel.write_bytes(b"old")
    failures = [(PartReport(0, 1, "error", "bad entry"),)]
    told, asked = await run(tmp_path, lambda part: failures.pop() if part == "b" and failures else DONE)
    assert not kernel.exists()
    assert asked[0] == "b"
    assert sorted(asked[1:]) == ["a", "b", "c"]
    assert told[-1].complete == ["a", "b", "c"]
    assert not told[-1].notes


async def test_a_part_that_fails_with_a_new_cache_too_is_tried_again_without_suspicion(tmp_path: Path) -> None:
    def b_fails(part: str) -> Reports:
        return (PartReport(0, 1, "error", "broken"),) if part == "b" else DONE

    await run(tmp_path, b_fails)
    for _ in range(2):
        told, asked = await run(tmp_path, b_fails)
        assert asked == ["b"]
        assert told[-1].complete == ["a", "c"]
        assert told[-1].notes == ["warm-up: b failed: broken"]
    told, asked = await run(tmp_path, lambda part: DONE)
    assert asked == ["b"]
    assert told[-1].complete == ["a", "b", "c"]
    assert not load_manifest(tmp_path, FIELDS).failed


async def test_daemons_whose_part_always_fails_do_not_clear_each_others_cache(tmp_path: Path) -> None:
    """Each one's first failure may: its part could have failed over the cache."""

    def b_fails(part: str) -> Reports:
        return (PartReport(0, 1, "error", "broken"),) if part == "b" else DONE

    for shape in ("8b", "70b", "8b"):
        await begin(tmp_path, b_fails, shape)[0]
    for shape in ("70b", "8b"):
        warming, _, asked = begin(tmp_path, b_fails, shape)
        await warming
        assert asked == ["b"]


async def test_a_part_whose_process_died_is_repeated_once_before_the_cache_is_suspected(tmp_path: Path) -> None:
    """The process may have been killed because the machine ran out of memory."""
    await run(tmp_path, lambda part: DONE if part != "b" else (PartReport(0, 1, "unsupported", "no"),))
    died: list[Reports] = [(None,)]
    told, asked = await run(tmp_path, lambda part: died.pop() if died else DONE)
    assert asked == ["b", "b"]
    assert told[-1].complete == ["a", "b", "c"]
    assert not told[-1].notes


async def test_a_cache_over_which_a_part_dies_twice_is_built_again(tmp_path: Path) -> None:
    await run(tmp_path, lambda part: DONE if part != "b" else (PartReport(0, 1, "unsupported", "no"),))
    died: list[Reports] = [(None,), (None,)]
    told, asked = await run(tmp_path, lambda part: died.pop() if died else DONE)
    assert asked[:2] == ["b", "b"]
    assert sorted(asked[2:]) == ["a", "b", "c"]
    assert told[-1].complete == ["a", "b", "c"]


async def test_parts_whose_workers_run_out_of_memory_together_run_again_alone(tmp_path: Path) -> None:
    full = (PartReport(0, 1, "memory", "full"),)
    together = asyncio.Barrier(2)
    tried = set[str]()

    async def first_fails(part: str) -> Sequence[PartReport]:
        if part in tried or part == "c":
            return DONE
        tried.add(part)
        await together.wait()
        return full

    told, asked = await run(tmp_path, first_fails)
    assert sorted(asked) == ["a", "a", "b", "b", "c"]
    assert told[-1].complete == ["a", "b", "c"]
    assert not told[-1].notes


async def test_a_worker_without_memory_gives_its_part_to_the_others(tmp_path: Path) -> None:
    scarce = [(PartReport(0, 1, "memory", "full"),)]
    told, asked = await run(tmp_path, lambda part: scarce.pop() if part == "a" and scarce else DONE)
    assert asked.count("a") == 2
    assert told[-1].complete == ["a", "b", "c"]
    told, _ = await run(tmp_path / "alone", lambda part: (PartReport(0, 1, "memory", "full"),), workers=1)
    assert not told[-1].complete


async def test_a_manifest_of_another_shape_stays(tmp_path: Path) -> None:
    await run(tmp_path, lambda part: DONE)
    found = load_manifest(tmp_path, FIELDS)
    assert isinstance(found, Manifest)
    assert found.parts.keys() == {"8b"}


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


def begin(folder: Path, script: Script, shape: str = "8b") -> tuple[asyncio.Task[None], Told, list[str]]:
    """Another daemon's warm-up of the same folder: its task, what it reports, and the parts that its workers ran."""
    alive, asked, told = set[Scripted](), list[str](), Told()

    async def start() -> Scripted:
        return Scripted(folder, script, alive, asked)

    task = WarmUpTask(config="{}", folder=str(folder), fields=FIELDS, shape=shape, workers=1)
    return asyncio.create_task(warm(task, PARTS, start, told.add)), told, asked


class Gate:
    """A script in which a part waits until the gate is open."""

    def __init__(self, part: str = "c") -> None:
        self.part, self.open = part, asyncio.Event()

    async def __call__(self, part: str) -> Reports:
        if part == self.part:
            await self.open.wait()
        return DONE


async def test_two_daemons_over_one_folder_compile_each_part_once(tmp_path: Path) -> None:
    gate = Gate()
    first, said, _ = begin(tmp_path, gate)
    await said.until(lambda progress: progress.complete == ["a", "b"])
    second, told, asked = begin(tmp_path, lambda part: DONE)
    await told.until(lambda progress: progress.waiting)
    assert told[-1].complete == ["a", "b"], "the second may use what is there"
    assert any("another daemon" in note for note in told[-1].notes)
    gate.open.set()
    await first
    await second
    assert not asked
    assert told[-1].ended
    assert told[-1].complete == ["a", "b", "c"]
    assert not told[-1].notes


async def test_a_daemon_that_waits_uses_each_part_that_the_other_completes(tmp_path: Path) -> None:
    gate = Gate("b")
    first, said, _ = begin(tmp_path, gate)
    await said.until(lambda progress: progress.complete == ["a"])
    second, told, _ = begin(tmp_path, lambda part: DONE)
    await told.until(lambda progress: progress.waiting)
    assert told[-1].complete == ["a"]
    gate.part = "c"
    gate.open.set()
    gate.open = asyncio.Event()
    await told.until(lambda progress: progress.complete == ["a", "b"])
    assert told[-1].waiting
    gate.open.set()
    await asyncio.gather(first, second)


async def test_a_daemon_that_leaves_while_it_waits_keeps_no_lock(tmp_path: Path) -> None:
    gate = Gate()
    first, said, _ = begin(tmp_path, gate)
    await said.until(lambda progress: progress.complete == ["a", "b"])
    second, told, _ = begin(tmp_path, lambda part: DONE)
    await told.until(lambda progress: progress.waiting)
    second.cancel()
    await asyncio.wait({second})
    first.cancel()
    await asyncio.wait({first})
    third, told, asked = begin(tmp_path, lambda part: DONE)
    await third
    assert asked == ["c"]
    assert told[-1].complete == ["a", "b", "c"]


async def test_a_complete_cache_is_used_while_another_daemon_fills_it_for_its_own_base(tmp_path: Path) -> None:
    await run(tmp_path, lambda part: DONE)
    gate = Gate()
    filling, said, _ = begin(tmp_path, gate, shape="70b")
    await said.until(lambda progress: progress.complete == ["a", "b"])
    told, asked = await run(tmp_path, lambda part: DONE)
    assert not asked
    assert told[-1].complete == ["a", "b", "c"]
    gate.open.set()
    await filling


async def test_a_daemon_that_waits_trusts_what_the_other_has_checked_alone(tmp_path: Path) -> None:
    """What it finds may be damaged, and cleared at any moment."""
    await run(tmp_path, lambda part: DONE)
    with closing(CacheLock(tmp_path)) as lock:
        assert lock.acquire_now()
        waiting, told, asked = begin(tmp_path, lambda part: DONE)
        await told.until(lambda progress: progress.waiting)
        assert not told[-1].complete
        save_manifest(tmp_path, msgspec.structs.replace(load_manifest(tmp_path, FIELDS), checked_by=lock.token))
        await waiting
    assert not asked
    assert told[-1].ended
    assert told[-1].complete == ["a", "b", "c"]


async def test_what_nobody_has_checked_is_checked_once_the_other_has_ended(tmp_path: Path) -> None:
    await run(tmp_path, lambda part: DONE)
    (tmp_path / "triton" / "a" / "kernel.cubin").write_bytes(b"?")
    with closing(CacheLock(tmp_path)) as lock:
        assert lock.acquire_now()
        waiting, told, asked = begin(tmp_path, lambda part: DONE)
        await told.until(lambda progress: progress.waiting)
    await waiting
    assert sorted(asked) == ["a", "b", "c"]


async def test_a_folder_that_cannot_be_locked_is_used_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    told, _ = await run(tmp_path, lambda part: DONE)
    assert told[-1].complete == ["a", "b", "c"]
