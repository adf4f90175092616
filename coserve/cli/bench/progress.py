"""Shows a benchmark's progress on standard error: a status line on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rich.console import Console

from coserve.core.cancellation import cancel_all
from coserve.workloads.metrics import Limits, attains, ttft
from coserve.workloads.replay import JobSample, JobUpdate, Sample
from coserve.workloads.report.tables import duration_text
from coserve.workloads.scenario import Scenario
from coserve.workloads.trace import PromptArrival

REDRAW, REPEAT = 0.25, 5.0
"""Seconds between two updates on a terminal, and elsewhere."""
RECENT = 50
"""Number of latest answers and training steps whose latency and speed are averaged."""


class BenchProgress:
    """Counts a replay's requests and responses. `prompts`: total requests of the workload."""

    def __init__(self, scenario: Scenario, prompts: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._start = clock, 0.0
        self._end, self._prompts, self._limits = scenario.window[1], prompts, Limits.of(scenario)
        self.sent = self.answered = self.failed = self.good = self.tokens = 0
        self.preparing = True
        self._first: deque[float] = deque(maxlen=RECENT)
        self._steps: deque[tuple[float, int]] = deque(maxlen=RECENT)

    def begin(self) -> None:
        """Mark the start: the first arrival is due now."""
        self.preparing, self._start = False, self._clock()

    def observe(self, sample: Sample | JobSample) -> None:
        if isinstance(sample, Sample):
            self.answered += sample.error is None
            self.failed += sample.error is not None
            self.good += attains(sample, self._limits)
            if sample.error is None and (first := ttft(sample)) is not None:
                self._first.append(first)

    def moved(self, event: PromptArrival | JobUpdate) -> None:
        """Count a request that is sent, or the tokens of a reported optimizer step."""
        if isinstance(event, PromptArrival):
            self.sent += 1
        elif event.tokens:
            self.tokens += event.tokens
            self._steps.append((self._clock(), event.tokens))

    def line(self) -> str:
        if self.preparing:
            return "making the adapters of this run"
        left = self._end - (self._clock() - self._start)
        failed = f", {self.failed} failed" if self.failed else ""
        parts = [f"requests: {self.sent} of {self._prompts} sent, {self.answered} answered{failed}{self._latest()}"]
        if self.tokens:
            parts.append(f"fine-tuned {self.tokens:,} tokens{self._speed()}")
        parts.append(f"{left:.0f} s left" if left > 0 else "waiting for the last ones")
        return "; ".join(parts)

    def _latest(self) -> str:
        if not self._first:
            return ""
        ended = self.answered + self.failed
        within = f", {self.good / ended:.1%} in the limits" if self._limits != Limits() else ""
        return f", TTFT lately {duration_text(statistics.median(self._first))}{within}"

    def _speed(self) -> str:
        # to now: jobs side by side report together, so the last step may come a moment after the first
        seconds = self._clock() - self._steps[0][0] if len(self._steps) > 2 else 0.0
        if not seconds:
            return ""
        return f", lately {sum(tokens for _, tokens in list(self._steps)[1:]) / seconds:,.0f}/s"


@asynccontextmanager
async def shown(progress: BenchProgress) -> AsyncIterator[None]:
    """Show `progress` while the block runs."""
    console = Console(stderr=True)
    task = asyncio.create_task(_redraw(console, progress) if console.is_terminal else _repeat(console, progress))
    try:
        yield
    finally:
        await cancel_all([task])
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
