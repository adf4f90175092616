"""Checkpoints and adapters are written on threads: only the job itself waits for the disk, and all durability
guarantees hold.

On the real loop, with real threads; a write is held up at a gate.
"""

from __future__ import annotations

import pytest

from coserve.core.errors import StorageFull
from coserve.core.link import jobs
from coserve.core.link.engine import EngineStopped, Shutdown
from coserve.core.link.link import FromEngine, ToEngine
from tests.support.job_scene import Scene, ask, ended, said, scene, start


async def hold(at: Scene) -> None:
    """Job `one`, a checkpoint every second step of five, up to where it waits at its gate."""
    at.trainer.go.set()
    at.api.send(start("one"))
    await at.held()


async def others_go_on(at: Scene) -> list[FromEngine]:
    at.api.send(start("two"))
    at.api.send(ask("text", 30))
    return await at.until(said(jobs.JobSucceeded, "two"), ended("text"))


def of_one(seen: list[FromEngine]) -> list[FromEngine]:
    return [message for message in seen if getattr(message, "id", None) == "one"]


def kinds(seen: list[FromEngine]) -> list[object]:
    """Of the messages about job `one`: checkpoints with their steps, all else but progress by type."""
    told = [message for message in of_one(seen) if not isinstance(message, jobs.JobProgress)]
    return [message.step if isinstance(message, jobs.JobCheckpoint) else type(message) for message in told]


async def test_a_job_trains_on_while_its_checkpoint_is_written() -> None:
    async with scene(holds="write") as at:
        await hold(at)
        seen = await others_go_on(at)
        assert kinds(seen) == [jobs.JobStarted], "a checkpoint is told of once it is durable"
        assert at.trainer.ran["one"] == [1, 2, 3, 4], "and the next one waits for it"
        at.trainer.gate.set()
        seen = await at.until(said(jobs.JobSucceeded, "one"))
        assert kinds(seen) == [jobs.JobStarted, 2, 4, jobs.JobSucceeded]


async def test_a_success_comes_after_all_checkpoints() -> None:
    async with scene(holds="write") as at:
        at.trainer.saved["one"] = 3  # it goes on from there, and has one checkpoint left
        await hold(at)
        seen = await others_go_on(at)
        assert at.trainer.ran["one"] == [4, 5] and kinds(seen) == [jobs.JobStarted]
        assert at.trainer.published == ["two"]
        at.trainer.gate.set()
        assert kinds(await at.until(said(jobs.JobSucceeded, "one"))) == [jobs.JobStarted, 4, jobs.JobSucceeded]


async def test_others_go_on_while_an_adapter_is_written() -> None:
    async with scene(holds="publish") as at:
        await hold(at)
        seen = await others_go_on(at)
        assert kinds(seen) == [jobs.JobStarted, 2, 4] and at.trainer.published == ["two"]
        at.trainer.gate.set()
        assert kinds(await at.until(said(jobs.JobSucceeded, "one"))) == [jobs.JobStarted, 2, 4, jobs.JobSucceeded]


@pytest.mark.parametrize("order", [jobs.PauseJob(id="one"), jobs.CancelJob(id="one")])
async def test_an_order_that_comes_while_the_adapter_is_written_is_too_late(order: ToEngine) -> None:
    async with scene(holds="publish") as at:
        await hold(at)
        at.api.send(order)
        await others_go_on(at)
        at.trainer.gate.set()
        assert kinds(await at.until(said(jobs.JobSucceeded, "one"))) == [jobs.JobStarted, 2, 4, jobs.JobSucceeded]


async def test_a_job_that_is_paused_and_resumed_while_its_adapter_is_written_does_not_run_again() -> None:
    async with scene(holds="publish", active=1) as at:
        await hold(at)
        for order in (jobs.PauseJob(id="one"), jobs.ResumeJob(id="one"), ask("text")):
            at.api.send(order)
        await at.until(ended("text"))
        at.trainer.gate.set()
        await at.until(said(jobs.JobSucceeded, "one"))
        at.api.send(start("two"))
        seen = await at.until(said(jobs.JobSucceeded, "two"))
        assert kinds(seen) == [jobs.JobStarted, 2, 4, jobs.JobSucceeded]


async def test_a_pause_waits_for_the_write_and_saves_the_last_step() -> None:
    async with scene(holds="write") as at:
        await hold(at)
        await others_go_on(at)  # job one is at step 4
        at.api.send(jobs.PauseJob(id="one"))
        at.api.send(ask("more"))
        seen = await at.until(ended("more"))
        assert kinds(seen) == [jobs.JobStarted]
        at.trainer.gate.set()
        seen = await at.until(said(jobs.JobPaused, "one"))
        assert kinds(seen) == [jobs.JobStarted, 2, 4, jobs.JobPaused]
        assert at.trainer.active == 0
        at.api.send(jobs.ResumeJob(id="one"))
        await at.until(said(jobs.JobSucceeded, "one"))
        assert at.trainer.ran["one"] == [5]


async def test_a_job_that_is_resumed_before_it_has_paused_pauses_and_goes_on() -> None:
    async with scene(holds="write") as at:
        await hold(at)
        for order in (jobs.PauseJob(id="one"), jobs.ResumeJob(id="one"), ask("text")):
            at.api.send(order)
        await at.until(ended("text"))
        at.trainer.gate.set()
        seen = kinds(await at.until(said(jobs.JobSucceeded, "one")))
        assert seen.index(jobs.JobPaused) < seen.index(jobs.JobStarted, 1)


async def test_a_pause_can_be_overtaken_by_a_cancel() -> None:
    async with scene(holds="write") as at:
        await hold(at)
        for order in (jobs.PauseJob(id="one"), jobs.CancelJob(id="one"), ask("text")):
            at.api.send(order)
        await at.until(ended("text"))
        at.trainer.gate.set()
        assert kinds(await at.until(said(jobs.JobCancelled, "one"))) == [jobs.JobStarted, 2, jobs.JobCancelled]


async def test_a_cancel_is_answered_when_nothing_of_the_job_writes_files() -> None:
    async with scene(holds="write") as at:
        await hold(at)
        at.api.send(jobs.CancelJob(id="one"))
        seen = await others_go_on(at)
        assert kinds(seen) == [jobs.JobStarted] and at.trainer.active == 1 and not at.trainer.mid_batch("one")
        at.trainer.gate.set()
        assert kinds(await at.until(said(jobs.JobCancelled, "one"))) == [jobs.JobStarted, 2, jobs.JobCancelled]
        assert at.trainer.active == 0


async def test_a_failure_is_told_when_nothing_of_the_job_writes_files() -> None:
    async with scene(holds="write") as at:
        await hold(at)
        at.trainer.operation = "advance"
        seen = await others_go_on(at)
        assert kinds(seen) == [jobs.JobStarted]
        at.trainer.gate.set()
        seen = await at.until(said(jobs.JobFailed, "one"))
        assert kinds(seen)[-1] is jobs.JobFailed and at.trainer.active == 0


@pytest.mark.parametrize("holds", ["write", "publish"])
async def test_a_stop_waits_for_what_is_written(holds: str) -> None:
    async with scene(holds=holds) as at:
        await hold(at)
        await others_go_on(at)
        at.adapters.close = at.trainer.gate.set  # the tick has ended by then
        at.api.send(Shutdown())
        seen = await at.until(lambda message: isinstance(message, EngineStopped))
        end = [4] if holds == "write" else [4, jobs.JobSucceeded]
        assert kinds(seen) == [jobs.JobStarted, 2, *end]


async def test_a_pause_under_way_is_kept_by_a_stop() -> None:
    async with scene(holds="write") as at:
        await hold(at)
        for message in (jobs.PauseJob(id="one"), ask("text")):
            at.api.send(message)
        await at.until(ended("text"))
        at.adapters.close = at.trainer.gate.set
        at.api.send(Shutdown())
        seen = kinds(await at.until(lambda message: isinstance(message, EngineStopped)))
        assert seen[:2] == [jobs.JobStarted, 2] and seen[-1] is jobs.JobPaused


async def test_a_full_disk_costs_a_checkpoint_not_the_job() -> None:
    async with scene("write", StorageFull) as at:
        at.trainer.go.set()
        at.api.send(start("one"))
        assert kinds(await at.until(said(jobs.JobSucceeded, "one"))) == [jobs.JobStarted, jobs.JobSucceeded]


async def test_a_full_disk_at_a_pause_costs_steps_not_the_job() -> None:
    async with scene("write", StorageFull, holds="prepare") as at:
        await hold(at)
        at.api.send(jobs.PauseJob(id="one"))
        assert kinds(await at.until(said(jobs.JobPaused, "one"))) == [jobs.JobStarted, jobs.JobPaused]
        at.trainer.gate.set()
        at.trainer.operation = ""
        at.api.send(jobs.ResumeJob(id="one"))
        await at.until(said(jobs.JobSucceeded, "one"))
