"""A GPU in virtual time: steps overlap the host's work, and their times depend on what they compute, with errors."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coserve.core.training.jobs import JobSpec
from coserve.core.training.micro_step import MicroStep
from coserve.generate.plan import Ran, Scheduled
from coserve.queues.shapes import StepShape
from tests.support.fake_ports import FREE, FakeGenerator, FakeTrainer, JobPlan, Meter
from tests.support.virtual_clock import VirtualClockLoop


@dataclass
class Noise:
    """Factors of times: normal errors, and now and then a pause of the machine."""

    rng: random.Random
    sigma: float
    hiccups: float
    """Share of steps and micro-steps that take `pause` seconds more."""
    pause: float = 0.01

    def __call__(self, seconds: float) -> float:
        noisy = seconds * max(0.7, self.rng.gauss(1.0, self.sigma))
        return noisy + (self.pause if self.rng.random() < self.hiccups else 0.0)


def _loop() -> VirtualClockLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualClockLoop)
    return loop


class OverlappedGenerator(FakeGenerator):
    """A step's tokens come with the next step, or with `collect`: both wait until the device has computed it."""

    overlaps = True

    def __init__(
        self,
        seconds: Callable[[StepShape], float],
        host: float,
        step_tokens: int,
        rng: random.Random,
        *,
        max_running: int = 8,
        max_queue: int = 4096,
        fair: bool = True,
    ) -> None:
        """`host`: seconds that the launch of a step takes."""
        super().__init__(Meter(), FREE, step_tokens, rng, 0.0, max_running=max_running, max_queue=max_queue, fair=fair)
        self._seconds, self._host, self._free_at = seconds, host, 0.0

    def run(self, scheduled: Sequence[Scheduled]) -> Ran:
        self.block(self.host_seconds(scheduled))
        return super().run(scheduled)

    def host_seconds(self, scheduled: Sequence[Scheduled]) -> float:
        """Seconds that the launch of a step takes."""
        return self._host

    def block(self, seconds: float) -> None:
        """Block the host."""
        _loop().block(seconds)

    def _compute(self, shape: StepShape, tokens: int) -> Callable[[], None]:
        return self.compute(self._seconds(shape))

    def compute(self, seconds: float) -> Callable[[], None]:
        """Give the device a step; the result waits for its end."""
        loop = _loop()
        end = self._free_at = max(loop.time(), self._free_at) + seconds
        return lambda: loop.block(max(0.0, end - loop.time()))


@dataclass
class BlockingTrainer(FakeTrainer):
    """Slices end with the device's work. `seconds`: of a micro-step of a kind, in a micro-batch of so many tokens."""

    seconds: Callable[[MicroStep, int], float] = lambda kind, tokens: 0.0
    batch_tokens: Callable[[int], int] = lambda step: 4096
    """Of the micro-batch of each step."""
    trained_steps: list[tuple[float, int]] = field(default_factory=list)
    """When each step ended, and its tokens."""

    def kinds(self, plan: JobPlan) -> list[MicroStep]:
        """`plan.micro_steps` layers."""
        layers, heads = plan.micro_steps, plan.micro_steps // 2
        forward = [MicroStep.BEGIN, *[MicroStep.FORWARD] * (layers - 1), *[MicroStep.HEAD] * heads]
        return [*forward, *[MicroStep.BACKWARD] * layers, MicroStep.OPTIMIZER]

    def before_slice(self, job: str, kinds: Sequence[MicroStep]) -> None:
        tokens = self.batch_tokens(self._runs[job].step)
        for kind in kinds:
            self.compute(self.seconds(kind, tokens))
        if len(kinds) == len(self._kinds_left(job)):
            self.trained_steps.append((_loop().time(), tokens))

    def compute(self, seconds: float) -> None:
        """Give the device a micro-step, and wait for its end."""
        _loop().block(seconds)

    def micro_batch_tokens(self, job: str) -> int:
        run = self._runs[job]
        begun = run.shared is not None
        return self.batch_tokens(run.step if begun else max(0, run.step - 1))


def job_always(spec: JobSpec) -> dict[str, JobPlan]:
    """A plan that does not end."""
    return {spec.id: JobPlan(1 << 30, 32, 1 << 30, None)}
