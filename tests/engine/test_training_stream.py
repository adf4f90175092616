"""Slices that run beside generation, on the real event loop: whatever happens while one is in flight, nothing waits for
it that need not, and nothing is lost."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from coserve.config import Config
from coserve.core.errors import EngineFault
from coserve.core.link.engine import EngineStopped, Shutdown
from coserve.core.link.jobs import (
    CancelJob,
    JobCancelled,
    JobCheckpoint,
    JobFailed,
    JobPaused,
    JobStarted,
    JobSucceeded,
    PauseJob,
    ResumeJob,
)
from coserve.core.training.micro_step import MicroStep
from coserve.engine.spatial.training_stream import prepare_environment
from tests.support.fake_ports import JobPlan
from tests.support.held_device import HeldDevice
from tests.support.job_scene import Scene, Trouble, ask, ended, said, scene, start


@dataclass
class Launching(Trouble):
    """The last micro-step of a step needs what the device computes. `idle`: whether it has."""

    idle: Callable[[], bool] = field(default=lambda: True)

    def kinds(self, plan: JobPlan) -> list[MicroStep]:
        return [*super().kinds(plan), MicroStep.RESULT]

    def before_slice(self, job: str, kinds: Sequence[MicroStep]) -> None:
        assert self.idle() or kinds[0] is not MicroStep.RESULT, "results were read too early"
        super().before_slice(job, kinds)


@pytest.fixture
def device() -> Iterator[HeldDevice]:
    held = HeldDevice(held=True)
    yield held
    held.release()


async def begin(at: Scene, device: HeldDevice, *jobs: str) -> None:
    """Until a slice of the first job is in flight."""
    trainer = at.trainer
    assert isinstance(trainer, Launching)
    trainer.idle = lambda: not device.busy
    trainer.go.set()
    for job in jobs:
        at.api.send(start(job))
    await at.until(said(JobStarted, jobs[0]))
    assert await asyncio.to_thread(device.launched.wait, 60)


async def test_requests_are_served_while_a_slice_is_in_flight(device: HeldDevice) -> None:
    async with scene(kind=Launching, mark=device.mark) as at:
        await begin(at, device, "one")
        at.api.send(ask("text", 50))
        await at.until(ended("text"))
        assert device.busy and len(device.marks) <= 2, "at most two slices are launched ahead"
        device.release()
        await at.until(said(JobSucceeded, "one"))


async def test_the_end_of_a_slice_wakes_the_engine(device: HeldDevice) -> None:
    """Nothing else does: there are no requests, and no timers."""
    async with scene(kind=Launching, mark=device.mark) as at:
        await begin(at, device, "one", "two")
        while len(device.marks) < 2:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert len(device.marks) == 2
        device.release()
        await at.until(said(JobSucceeded, "one"), said(JobSucceeded, "two"), said(JobCheckpoint, "one"))


@pytest.mark.parametrize(("message", "answer"), [(PauseJob, JobPaused), (CancelJob, JobCancelled)])
async def test_a_job_ends_while_its_slice_is_in_flight(
    device: HeldDevice, message: type[PauseJob | CancelJob], answer: type[JobPaused | JobCancelled]
) -> None:
    """The others train on when the device is free."""
    async with scene(kind=Launching, mark=device.mark) as at:
        await begin(at, device, "one", "two")
        at.api.send(message(id="one"))
        await at.until(said(answer, "one"))
        assert device.busy
        device.release()
        await at.until(said(JobSucceeded, "two"))
        at.api.send(ResumeJob(id="one"))
        if answer is JobPaused:
            await at.until(said(JobSucceeded, "one"))


async def test_a_job_that_fails_in_a_launch_ends_alone(device: HeldDevice) -> None:
    device.release()
    async with scene("advance", kind=Launching, mark=device.mark) as at:
        await begin(at, device, "one", "two")
        seen = await at.until(said(JobFailed, "one"), said(JobSucceeded, "two"))
        assert not any(map(said(JobSucceeded, "one"), seen))


async def test_the_engine_stops_while_a_slice_is_in_flight(device: HeldDevice) -> None:
    async with scene(kind=Launching, mark=device.mark) as at:
        await begin(at, device, "one")
        at.api.send(Shutdown())
        await at.until(lambda message: isinstance(message, EngineStopped))
        assert device.busy


async def test_a_device_that_fails_in_a_slice_ends_the_engine(device: HeldDevice) -> None:
    async with scene(kind=Launching, mark=device.mark) as at:
        await begin(at, device, "one")
        device.fail()
        with pytest.raises(EngineFault):
            async with asyncio.timeout(60):
                await at.running


def test_streams_of_a_split_gpu_get_connections_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # so that it is restored
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    for policy, expected in (("slack", None), ("spatial", "32"), ("overlap", "32")):
        prepare_environment(Config(policy=policy))
        assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    prepare_environment(Config(policy="spatial"))
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "16"
