"""A device that computes training beside everything else, in virtual time, and a trainer that only launches on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from coserve.core.training.micro_step import MicroStep
from tests.support.fake_ports import FakeTrainer, JobPlan, Meter

LAUNCH = 0.1
"""Share of a slice's seconds that its launch takes the host."""


class FakeDevice(Meter):
    """The meter of a trainer whose slices run beside generation steps. `host` is charged for their launches."""

    def __init__(self, host: Meter) -> None:
        super().__init__()
        self._host, self.marks = host, list[Future[None]]()
        self.free_at = 0.0
        """When all that was launched is computed."""
        self.ended: Callable[[], None] = lambda: None
        """Called before the engine is woken by the end of a slice."""

    def charge(self, kind: str, seconds: float) -> None:
        self._host.charge(kind, LAUNCH * seconds)
        self.free_at = max(asyncio.get_running_loop().time(), self.free_at) + seconds

    @property
    def in_flight(self) -> int:
        """Slices that are not done."""
        return sum(not mark.done() for mark in self.marks)

    def mark(self) -> Future[None]:
        """See `slices_in_flight.Mark`."""
        mark, loop = Future[None](), asyncio.get_running_loop()

        def end() -> None:
            loop.call_soon(self.ended)
            mark.set_result(None)

        self.marks.append(mark)
        loop.call_at(self.free_at, end)
        return mark


class LaunchingTrainer(FakeTrainer):
    """Each step ends with a micro-step that needs its results: it must not begin before the device has computed
    them."""

    def cost(self, kind: MicroStep) -> float:
        return 0.0 if kind is MicroStep.RESULT else super().cost(kind)

    def kinds(self, plan: JobPlan) -> list[MicroStep]:
        return [*super().kinds(plan), MicroStep.RESULT]

    def before_slice(self, job: str, kinds: Sequence[MicroStep]) -> None:
        device = self.meter
        assert isinstance(device, FakeDevice)
        if kinds[0] is MicroStep.RESULT:
            assert device.free_at <= self.clock(), "its results are not computed yet"
