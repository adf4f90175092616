"""A job trains on while samples of its snapshot are generated, and waits where the next ones are due. On the real loop,
with real threads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from coserve.core.link import jobs
from coserve.core.link.link import FromEngine
from coserve.core.types import AdapterRef
from tests.support.job_scene import Scene, ask, ended, said, scene, start


@pytest.fixture
async def at() -> AsyncIterator[Scene]:
    """Job `one` of five steps: a snapshot and a checkpoint are due after every second one."""
    async with scene() as made:
        made.trainer.sample_every = 2
        made.trainer.go.set()
        made.api.send(start("one"))
        yield made


def snapshot(step: int) -> Callable[[FromEngine], bool]:
    return lambda message: isinstance(message, jobs.JobSnapshot) and (message.id, message.step) == ("one", step)


def progress(step: int) -> Callable[[FromEngine], bool]:
    return lambda message: isinstance(message, jobs.JobProgress) and message.metrics.step == step


def steps(seen: list[FromEngine]) -> list[int]:
    return [message.step for message in seen if isinstance(message, jobs.JobSnapshot)]


def done(step: int) -> jobs.SnapshotDone:
    return jobs.SnapshotDone(id="one", ref=AdapterRef("one:snapshot", step))


async def others_go_on(at: Scene, text: str) -> None:
    """The engine has had time for all that it may do."""
    at.api.send(ask(text, 30))
    await at.until(ended(text))


async def test_the_next_samples_wait_for_the_last_ones_and_so_does_the_end(at: Scene) -> None:
    await at.until(snapshot(2), progress(4))  # it trains on
    await others_go_on(at, "meanwhile")
    assert steps(at.seen) == [2] and not any(map(progress(5), at.seen))
    at.api.send(done(1))  # not this one
    await others_go_on(at, "later")
    assert steps(at.seen) == [2]
    at.api.send(done(2))
    await at.until(snapshot(4), progress(5))
    await others_go_on(at, "at last")
    assert steps(at.seen) == [2, 4] and at.trainer.published == []
    at.api.send(done(4))
    await at.until(snapshot(5))
    await others_go_on(at, "at the end")
    assert at.trainer.published == []
    at.api.send(done(5))
    await at.until(said(jobs.JobSucceeded, "one"))
    assert at.trainer.ran["one"] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("reached", [4, 5])
async def test_a_job_that_waits_for_samples_can_be_paused_and_goes_on(at: Scene, reached: int) -> None:
    await at.until(snapshot(2), progress(4))
    if reached == 5:
        at.api.send(done(2))
        await at.until(snapshot(4), progress(5))
    at.api.send(jobs.PauseJob(id="one"))
    await at.until(said(jobs.JobPaused, "one"))
    at.seen.clear()
    at.api.send(jobs.ResumeJob(id="one"))
    await at.until(snapshot(reached))  # once more: whoever has its samples says so at once
    at.api.send(done(reached))
    if reached == 4:
        await at.until(snapshot(5))
        at.api.send(done(5))
    await at.until(said(jobs.JobSucceeded, "one"))


async def test_the_end_of_samples_may_be_told_twice(at: Scene) -> None:
    await at.until(snapshot(2))
    for step in (2, 2, 4, 4, 5, 5):
        if step != 2:
            await at.until(snapshot(step))
        at.api.send(done(step))
    await at.until(said(jobs.JobSucceeded, "one"))


async def test_a_job_that_waits_for_samples_can_be_cancelled(at: Scene) -> None:
    await at.until(snapshot(2), progress(4))
    at.api.send(jobs.CancelJob(id="one"))
    await at.until(said(jobs.JobCancelled, "one"))
    at.api.send(done(2))
    await others_go_on(at, "after it")
    assert steps(at.seen) == [2]


async def test_a_snapshot_that_fails_ends_its_job_alone() -> None:
    async with scene("snapshot") as at:
        at.trainer.sample_every = 2
        at.trainer.go.set()
        at.api.send(start("one"))
        await at.until(said(jobs.JobFailed, "one"))
        await others_go_on(at, "others")
