"""Send a trace to a daemon and record when everything happened.

Open loop: each arrival is sent at its time, whether or not earlier ones were answered, so a slow server gets the same
load as a fast one. Latencies count from the time an arrival was due, not from when it was sent; `Sample.sent` shows the
difference.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from coserve.core.errors import CoserveError
from coserve.core.types import JobState, SloClass, Wire
from coserve.workloads.gauges import Snapshot
from coserve.workloads.scenario import Scenario
from coserve.workloads.trace import FinetuneArrival, PromptArrival, Trace

REQUEST_TIMEOUT = 600.0
"""Seconds."""
MESSAGE_LENGTH = 300
"""Characters of an error message that are kept."""


@dataclass(frozen=True)
class JobUpdate:
    """An event of a job: `tokens` more were trained, or its state changed."""

    tokens: int = 0
    state: JobState | None = None


class Usage(NamedTuple):
    """What the server counted of a request, in tokens."""

    prompt_tokens: int
    output_tokens: int
    finish_reason: str | None = None
    """Why the answer ended; None: the server did not say."""


class Target(Protocol):
    """The server as seen by a replay. Every method may raise `CoserveError` or `OSError`; both are recorded as
    errors."""

    def generate(self, arrival: PromptArrival) -> AsyncIterator[int | Usage]:
        """Stream a generation: the number of new tokens of each chunk, as it arrives, and at the end the server's count
        if it has one, which then is the number of the answer's tokens. The answer is complete with what comes last.
        """
        ...

    async def submit(self, arrival: FinetuneArrival) -> str:
        """Start a job; returns its id."""
        ...

    def watch(self, job: str) -> AsyncIterator[JobUpdate]:
        """Stream the updates of a job until it ends. Raises the error with which it failed, also for one that is
        paused."""
        ...

    async def cancel(self, job: str) -> None: ...


class Rest(StrEnum):
    """What to do with jobs that still run when the last prompt is answered."""

    DRAIN = "drain"
    """Wait for them; they count to their end."""
    CANCEL = "cancel"
    LEAVE = "leave"
    """Leave them running."""


class Sample(Wire, frozen=True):
    """One generation. Times in seconds since the replay began."""

    index: int
    adapter: str | None
    due: float
    sent: float
    times: tuple[float, ...]
    """When each chunk with tokens arrived."""
    tokens: int
    finished: float
    """When the last of the answer arrived."""
    error: str | None = None
    """Error code; `finished` is then the time of the error."""
    message: str | None = None
    """The error's own words."""
    prompt_tokens: int | None = None
    """None: the server did not say."""
    slo_class: SloClass | None = None


class JobSample(Wire, frozen=True):
    """One fine-tuning job. Times in seconds since the replay began."""

    index: int
    adapter: str
    rows: int
    due: float
    sent: float
    job: str | None
    """None: it was not accepted."""
    trained: tuple[tuple[float, int], ...]
    """Time at which each optimizer step was reported, and its tokens."""
    state: JobState | None
    """The last one reported."""
    error: str | None = None
    message: str | None = None


class ReplayResult(Wire, frozen=True):
    """All samples. `duration`: from the start to the last answer, or to the end of the last job if jobs were awaited,
    or to the interruption.

    `snapshots`: the server's gauges over time, if it was asked for them.
    """

    scenario: Scenario
    duration: float
    samples: tuple[Sample, ...]
    jobs: tuple[JobSample, ...]
    snapshots: tuple[Snapshot, ...] = ()
    interrupted: bool = False
    """It was cancelled: requests and jobs that had not ended are missing."""


Probe = Callable[[float], Awaitable[Snapshot]]
"""Asks the server for its gauges; gets the time."""
Observer = Callable[[Sample | JobSample], None]


async def replay(
    trace: Trace,
    target: Target,
    *,
    rest: Rest = Rest.DRAIN,
    request_timeout: float = REQUEST_TIMEOUT,
    observe: Observer | None = None,
    probe: Probe | None = None,
    probe_interval: float = 1.0,
    on_interrupt: Callable[[ReplayResult], None] = lambda _: None,
) -> ReplayResult:
    """Send every arrival at its time, and wait for the answers. A replay that is cancelled gives what it has to
    `on_interrupt`.

    A generation that takes longer than `request_timeout` seconds is abandoned (error `timeout`). `observe` is called
    with each sample as soon as it is complete, `probe` every `probe_interval` seconds until the end.
    """
    recorder = _Recorder(target, asyncio.get_running_loop().time(), request_timeout, observe or (lambda sample: None))
    try:
        duration = await _send(trace, recorder, rest, probe, probe_interval)
    except asyncio.CancelledError:
        on_interrupt(recorder.result(trace.scenario, recorder.now(), interrupted=True))
        raise
    return recorder.result(trace.scenario, duration)


async def _send(trace: Trace, recorder: _Recorder, rest: Rest, probe: Probe | None, probe_interval: float) -> float:
    """The replay; its duration in seconds."""
    async with asyncio.TaskGroup() as watching:
        probing = watching.create_task(recorder.probe(probe, probe_interval)) if probe is not None else None
        async with asyncio.TaskGroup() as sending:
            for arrival in trace.arrivals:
                await asyncio.sleep(arrival.at - recorder.now())
                if isinstance(arrival, PromptArrival):
                    sending.create_task(recorder.generate(arrival))
                else:
                    sending.create_task(recorder.submit(arrival, watching))
        duration = recorder.now()
        if rest is Rest.DRAIN:
            await recorder.watched()
        else:
            recorder.stop_watching()
        if probing is not None:
            probing.cancel()
    if rest is Rest.DRAIN:
        duration = recorder.now()
    if rest is Rest.CANCEL:
        await recorder.cancel_unfinished()
    return duration


@dataclass
class _Watched:
    """A job so far."""

    arrival: FinetuneArrival
    sent: float
    job: str | None = None
    trained: list[tuple[float, int]] = field(default_factory=list)
    state: JobState | None = None
    error: str | None = None
    message: str | None = None

    def fail(self, failure: CoserveError | OSError) -> None:
        self.error, self.message = _failure(failure)

    def sample(self) -> JobSample:
        return JobSample(
            index=self.arrival.index,
            adapter=self.arrival.adapter,
            rows=len(self.arrival.rows),
            due=self.arrival.at,
            sent=self.sent,
            job=self.job,
            trained=tuple(self.trained),
            state=self.state,
            error=self.error,
            message=self.message,
        )


@dataclass
class _Recorder:
    target: Target
    start: float
    request_timeout: float
    observe: Observer
    samples: list[Sample] = field(default_factory=list)
    jobs: list[JobSample] = field(default_factory=list)
    watches: list[asyncio.Task[None]] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)

    def now(self) -> float:
        return asyncio.get_running_loop().time() - self.start

    async def generate(self, arrival: PromptArrival) -> None:
        sent, times, tokens = self.now(), list[float](), 0
        finished = sent
        error = message = None
        usage: Usage | None = None
        try:
            async with asyncio.timeout(self.request_timeout):
                async for new in self.target.generate(arrival):
                    finished = self.now()
                    if isinstance(new, Usage):
                        usage = new
                    elif new:
                        times.append(finished)
                        tokens += new
        except (CoserveError, OSError) as failure:  # TimeoutError is an OSError
            finished = self.now()
            error, message = _failure(failure)
        if usage is not None and times:
            tokens = usage.output_tokens
        if error is None:
            error, message = _wrong_length(arrival, tokens, usage)
        sample = Sample(
            index=arrival.index,
            adapter=arrival.adapter,
            due=arrival.at,
            sent=sent,
            times=tuple(times),
            tokens=tokens,
            finished=finished,
            error=error,
            message=message,
            prompt_tokens=None if usage is None else usage.prompt_tokens,
            slo_class=arrival.slo_class,
        )
        self.samples.append(sample)
        self.observe(sample)

    async def submit(self, arrival: FinetuneArrival, watching: asyncio.TaskGroup) -> None:
        watched = _Watched(arrival, self.now())
        try:
            watched.job = await self.target.submit(arrival)
        except (CoserveError, OSError) as failure:
            watched.fail(failure)
            self._complete(watched)
            return
        watch = watching.create_task(self._watch(watched, watched.job))
        # A callback, since a task that is cancelled before its first step never runs.
        watch.add_done_callback(lambda _: self._complete(watched))
        self.watches.append(watch)

    async def _watch(self, watched: _Watched, job: str) -> None:
        try:
            async for progress in self.target.watch(job):
                watched.state = progress.state or watched.state
                if progress.tokens:
                    watched.trained.append((self.now(), progress.tokens))
        except (CoserveError, OSError) as failure:
            watched.fail(failure)

    def _complete(self, watched: _Watched) -> None:
        self.jobs.append(watched.sample())
        self.observe(self.jobs[-1])

    async def probe(self, ask: Probe, interval: float) -> None:
        """Gauges that cannot be had are missing, no more."""
        while True:
            with suppress(CoserveError, OSError):
                self.snapshots.append(await ask(self.now()))
            await asyncio.sleep(interval)

    def result(self, scenario: Scenario, duration: float, *, interrupted: bool = False) -> ReplayResult:
        return ReplayResult(
            scenario=scenario,
            duration=duration,
            samples=tuple(sorted(self.samples, key=lambda sample: sample.index)),
            jobs=tuple(sorted(self.jobs, key=lambda job: job.index)),
            snapshots=tuple(self.snapshots),
            interrupted=interrupted,
        )

    async def watched(self) -> None:
        """Wait until every job has ended."""
        if self.watches:
            await asyncio.wait(self.watches)

    def stop_watching(self) -> None:
        for watch in self.watches:
            watch.cancel()

    async def cancel_unfinished(self) -> None:
        for sample in self.jobs:
            if sample.job is None or (sample.state is not None and sample.state.terminal):
                continue
            try:
                await self.target.cancel(sample.job)
            except (CoserveError, OSError):  # it ended in the meantime, or nobody answers
                continue


def _wrong_length(arrival: PromptArrival, tokens: int, usage: Usage | None) -> tuple[str | None, str | None]:
    """Code and message for a whole answer that is not what was asked for. Only the server can tell how many tokens are
    missing."""
    if not tokens:
        return "no_tokens", "the answer has no tokens"
    if usage is None or usage.output_tokens >= arrival.max_tokens:
        return None, None
    reason = "" if usage.finish_reason is None else f" (finish reason: {usage.finish_reason})"
    return "short_answer", f"expected {arrival.max_tokens} tokens, got {usage.output_tokens}{reason}"


def _failure(failure: CoserveError | OSError) -> tuple[str, str]:
    """Code and message, which is one line of printable characters."""
    if isinstance(failure, CoserveError):
        code, text = failure.code, str(failure)
    elif isinstance(failure, TimeoutError):
        code, text = "timeout", str(failure) or "no answer in time"
    else:
        code, text = "connection", str(failure) or type(failure).__name__
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 2 * MESSAGE_LENGTH]).split())
    return code, line[:MESSAGE_LENGTH]
