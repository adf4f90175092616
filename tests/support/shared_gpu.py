"""A GPU in virtual time that computes a generation step and training at the same time, each slower than alone."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from coserve.core.training.micro_step import MicroStep
from tests.support.fake_gpu import BlockingTrainer, OverlappedGenerator
from tests.support.fake_ports import JobPlan
from tests.support.virtual_clock import VirtualClockLoop


@dataclass
class _Work:
    left: float
    """Seconds alone."""
    after: tuple[_Work, ...] = ()
    """What must have been computed before."""
    marks: list[Future[None]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.left <= 1e-12


class SharedGpu:
    """Two streams. While both compute, a step has the share `step_speed` of its speed, and training `train_speed`."""

    def __init__(self, step_speed: float, train_speed: float, *, divided: bool = False) -> None:
        """`divided`: each has its own multiprocessors, and this speed while it computes alone, too."""
        self._speeds, self._divided = (step_speed, train_speed), divided
        self._queues: tuple[deque[_Work], deque[_Work]] = deque(), deque()
        """Of steps and of training."""
        self._last_step, self._last_slice = _Work(0.0), _Work(0.0)
        self._barrier, self._waits = _Work(0.0), False
        self._now = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._trained = [(0.0, 0.0)]
        """Seconds of training, alone, that were computed until a time."""
        self.both = 0.0
        """Seconds in which a step and training were computed."""

    @property
    def trains(self) -> bool:
        return bool(self._queues[1])

    def trained_at(self, time: float) -> float:
        """Seconds of training, alone, that were computed until then."""
        (before, least), (after, most) = (
            max((each for each in self._trained if each[0] <= time), default=(0.0, 0.0)),
            min((each for each in self._trained if each[0] > time), default=(time, self._trained[-1][1])),
        )
        return least + (most - least) * (time - before) / (after - before) if after > before else least

    def step(self, seconds: float) -> _Work:
        self._advance(self._loop.time())
        self._last_step = _Work(seconds, (self._last_slice,) if self._waits else ())
        self._queues[0].append(self._last_step)
        self._wake()
        return self._last_step

    def slice(self, seconds: float) -> None:
        self._advance(self._loop.time())
        self._last_slice = _Work(seconds, (self._barrier,))
        self._queues[1].append(self._last_slice)
        self._wake()

    @contextmanager
    def between(self) -> Iterator[None]:
        """See `slices_in_flight.Between`."""
        self._waits = True
        yield
        self._waits, self._barrier = False, self._last_step

    def mark(self) -> Future[None]:
        """Of training: see `slices_in_flight.Mark`."""
        return self._mark(1)

    def mark_step(self) -> Future[None]:
        """Of generation."""
        return self._mark(0)

    def _mark(self, which: int) -> Future[None]:
        mark = Future[None]()
        self._advance(self._loop.time())
        if self._queues[which]:
            self._queues[which][-1].marks.append(mark)
        else:
            mark.set_result(None)
        self._wake()
        return mark

    def wait(self, work: _Work) -> None:
        """Block the host until it is computed; marks are done meanwhile."""
        while not work.done:
            self._advance(self._now + self._next())

    def block(self, seconds: float) -> None:
        """Block the host; marks are done meanwhile."""
        self._advance(self._loop.time() + seconds)

    @property
    def _loop(self) -> VirtualClockLoop:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualClockLoop)
        return loop

    def _running(self) -> list[tuple[int, float]]:
        """The queues whose first work is computed, and its speed."""
        ready = [i for i, queue in enumerate(self._queues) if queue and all(work.done for work in queue[0].after)]
        return [(i, self._speeds[i] if self._divided or len(ready) == 2 else 1.0) for i in ready]

    def _next(self) -> float:
        """Seconds until some work ends."""
        return min(max(0.0, self._queues[i][0].left) / speed for i, speed in self._running())

    def _advance(self, to: float) -> None:
        """Compute until then, which is now or later."""
        while self._now < to or any(self._queues[i][0].done for i, _ in self._running()):
            running = self._running()
            seconds = min(to - self._now, self._next()) if running else to - self._now
            for i, speed in running:
                self._queues[i][0].left -= seconds * speed
            self._now += seconds
            self._trained.append((self._now, self._trained[-1][1] + seconds * dict(running).get(1, 0.0)))
            self.both += seconds * (len(running) == 2)
            self._loop.block(max(0.0, self._now - self._loop.time()))
            for i, _ in running:
                if self._queues[i][0].done:
                    for mark in self._queues[i].popleft().marks:
                        mark.set_result(None)

    def _wake(self) -> None:
        """Marks are done in time while the host sleeps."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._now + self._next(), self._due) if self._running() else None

    def _due(self) -> None:
        self._advance(self._loop.time())
        self._timer = None
        self._wake()


class SharingGenerator(OverlappedGenerator):
    """Its steps run on a `SharedGpu`."""

    gpu: SharedGpu

    def compute(self, seconds: float) -> Any:
        work = self.gpu.step(seconds)
        return lambda: self.gpu.wait(work)

    def block(self, seconds: float) -> None:
        self.gpu.block(seconds)


@dataclass
class SharingTrainer(BlockingTrainer):
    """Launches on a `SharedGpu`, which takes the host `launch` of the device's seconds."""

    gpu: SharedGpu = field(default_factory=lambda: SharedGpu(1.0, 1.0))
    launch: float = 0.2

    def kinds(self, plan: JobPlan) -> list[MicroStep]:
        return [*super().kinds(plan), MicroStep.RESULT]

    def before_slice(self, job: str, kinds: Sequence[MicroStep]) -> None:
        assert not (kinds[0] is MicroStep.RESULT and self.gpu.trains), "its results are not there yet"
        super().before_slice(job, kinds)

    def compute(self, seconds: float) -> None:
        self.gpu.slice(seconds)
        self.gpu.block(self.launch * seconds)


class WholeTrainer(SharingTrainer):
    """The host waits for its slices, as under policies that launch nothing ahead."""

    def compute(self, seconds: float) -> None:
        self.gpu.slice(seconds)
        self.gpu.block(seconds)
