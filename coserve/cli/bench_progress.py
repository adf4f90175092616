"""A benchmark's progress on standard error: a status line on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rich.console import Console

from coserve.schemas import JobEvent
from coserve.workloads.replay import JobSample, Sample
from coserve.workloads.scenario import PromptArrival, Trace
from coserve.workloads.target import DaemonTarget

REDRAW, REPEAT = 0.25, 5.0
"""Seconds between two lines on a terminal, and elsewhere."""


class BenchProgress:
    """Counts a replay's requests and responses."""

    def __init__(self, trace: Trace, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._start = clock, 0.0
        self._duration, self._prompts = trace.scenario.duration, len(trace.prompts)
        self.sent = self.answered = self.failed = self.tokens = 0
        self.preparing = True

    def begin(self) -> None:
        """The first arrival is due now."""
        self.preparing, self._start = False, self._clock()

    def observe(self, sample: Sample | JobSample) -> None:
        if isinstance(sample, Sample):
            self.answered += sample.error is None
            self.failed += sample.error is not None

    def line(self) -> str:
        if self.preparing:
            return "making the adapters of this run"
        left = self._duration - (self._clock() - self._start)
        time_left = f"{left:.0f} s left" if left > 0 else "waiting for the last ones"
        failed = f", {self.failed} failed" if self.failed else ""
        return (
            f"requests: {self.sent} of {self._prompts} sent, {self.answered} answered{failed}; "
            f"fine-tuned {self.tokens:,} tokens; {time_left}"
        )


class CountedTarget(DaemonTarget):
    """A target that reports its requests and training tokens to a `BenchProgress`."""

    progress: BenchProgress

    async def generate(self, arrival: PromptArrival) -> AsyncIterator[int]:
        self.progress.sent += 1
        async for tokens in super().generate(arrival):
            yield tokens

    def seen(self, event: JobEvent) -> None:
        if event.metrics is not None:
            self.progress.tokens += event.metrics.tokens


@asynccontextmanager
async def shown(progress: BenchProgress) -> AsyncIterator[None]:
    """Show `progress` while the block runs."""
    console = Console(stderr=True)
    task = asyncio.create_task(_redraw(console, progress) if console.is_terminal else _repeat(console, progress))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not progress.preparing:
            console.print(progress.line(), highlight=False, soft_wrap=True)


async def _redraw(console: Console, progress: BenchProgress) -> None:
    with console.status(progress.line()) as status:
        while True:
            status.update(progress.line())
            await asyncio.sleep(REDRAW)


async def _repeat(console: Console, progress: BenchProgress) -> None:
    while True:
        console.print(progress.line(), highlight=False, soft_wrap=True)
        await asyncio.sleep(REPEAT)
