"""Sends a trace to a daemon and records when everything happens.

The load is open-loop: each arrival is sent at its time, whether or not earlier ones were answered, so a slow server
gets the same load as a fast one. Latencies count from the time an arrival was due, not from when it was sent;
`Sample.sent` shows the difference.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from coserve.core.errors import CoserveError
from coserve.core.training.jobs import JobState
from coserve.core.types import SloClass, Wire
from coserve.workloads.gauges import Snapshot
from coserve.workloads.scenario import Scenario
from coserve.workloads.trace import FinetuneArrival, PromptArrival, Trace

REQUEST_TIMEOUT = 600.0
"""Default timeout of a request in seconds."""
MESSAGE_LENGTH = 300
"""Maximum characters kept of an error message."""


@dataclass(frozen=True)
class JobUpdate:
    """An event of a job: `tokens` more were trained, or its state changed."""

    tokens: int = 0
    state: JobState | None = None


class Usage(NamedTuple):
    """The server's token counts of a request."""

    prompt_tokens: int
    output_tokens: int
    finish_reason: str | None = None
    """Reason for the answer's end; None: the server did not say."""


class Target(Protocol):
    """The server that a replay sends to. Every method may raise `CoserveError` or `OSError`; both are recorded as
    errors."""

    def generate(self, arrival: PromptArrival) -> AsyncIterator[int | Usage]:
        """Stream a generation: the number of new tokens of each chunk as it arrives, then, if the server counts, a
        `Usage` that overrides their sum. The answer is complete at the last item."""
        ...

    async def submit(self, arrival: FinetuneArrival) -> str:
        """Start a job and return its id."""
        ...

    def watch(self, job: str) -> AsyncIterator[JobUpdate]:
        """Stream the updates of a job until it ends. Raises the error with which it failed or was paused."""
        ...

    async def cancel(self, job: str) -> None: ...


class Rest(StrEnum):
    """Action on jobs that still run when the last prompt is answered."""

    DRAIN = "drain"
    """Wait for them; their whole time is measured."""
    CANCEL = "cancel"
    LEAVE = "leave"
    """Leave them running."""


class Sample(Wire, frozen=True):
    """Result of one generation. Times in seconds since the replay began."""

    index: int
    adapter: str | None
    due: float
    sent: float
    times: tuple[float, ...]
    """Arrival time of each chunk with tokens."""
    tokens: int
    finished: float
    """Arrival time of the answer's last item."""
    error: str | None = None
    """Error code; `finished` is then the time of the error."""
    message: str | None = None
    """The error's message."""
    prompt_tokens: int | None = None
    """None: the server did not say."""
    slo_class: SloClass | None = None


class JobSample(Wire, frozen=True):
    """Result of one fine-tuning job. Times in seconds since the replay began."""

    index: int
    adapter: str
    rows: int
    due: float
    sent: float
    job: str | None
    """Id of the job; None: it was not accepted."""
    trained: tuple[tuple[float, int], ...]
    """For each optimizer step: the time it was reported, and its tokens."""
    state: JobState | None
    """The last reported state."""
    error: str | None = None
    message: str | None = None


class ReplayResult(Wire, frozen=True):
    """All samples of a replay. `duration`: seconds from the start to the last answer, to the end of the last job if
    jobs were awaited, or to the interruption.

    `snapshots`: the server's gauges over time, if requested.
    """

    scenario: Scenario
    duration: float
    samples: tuple[Sample, ...]
    jobs: tuple[JobSample, ...]
    snapshots: tuple[Snapshot, ...] = ()
    interrupted: bool = False
    """The replay was cancelled: unfinished requests and jobs are missing."""


Probe = Callable[[float], Awaitable[Snapshot]]
"""Reads the server's gauges; the argument is the time."""
Observer = Callable[[Sample | JobSample], None]
Progress = Callable[[PromptArrival | JobUpdate], None]


async def replay(
    trace: Trace,
    target: Target,
    *,
    rest: Rest = Rest.DRAIN,
    request_timeout: float = REQUEST_TIMEOUT,
    observe: Observer = lambda _: None,
    progress: Progress = lambda _: None,
    probe: Probe | None = None,
    probe_interval: float = 1.0,
    on_interrupt: Callable[[ReplayResult], None] = lambda _: None,
) -> ReplayResult:
    """Send every arrival at its time, and wait for the answers. A replay that is cancelled passes its results so far to
    `on_interrupt`.

    A generation that takes longer than `request_timeout` seconds is abandoned (error `timeout`). `observe` is called
    with each sample as soon as it is complete, `progress` with each request that is sent and each report of a job,
    `probe` every `probe_interval` seconds until the end.
    """
    recorder = _Recorder(target, asyncio.get_running_loop().time(), request_timeout, observe, progress)
    try:
        duration = await _send(trace, recorder, rest, probe, probe_interval)
    except asyncio.CancelledError:
        on_interrupt(recorder.result(trace.scenario, recorder.now(), interrupted=True))
        raise
    return recorder.result(trace.scenario, duration)


async def _send(trace: Trace, recorder: _Recorder, rest: Rest, probe: Probe | None, probe_interval: float) -> float:
    """Run the replay and return its duration in seconds."""
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
    """State of a job so far."""

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
    progress: Progress
    samples: list[Sample] = field(default_factory=list)
    jobs: list[JobSample] = field(default_factory=list)
    watches: list[asyncio.Task[None]] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)

    def now(self) -> float:
        return asyncio.get_running_loop().time() - self.start

    async def generate(self, arrival: PromptArrival) -> None:
        sent, times, tokens = self.now(), list[float](), 0
        finished = sent
        self.progress(arrival)
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
        # A done callback, since a task that is cancelled before its first step never runs its body.
        watch.add_done_callback(lambda _: self._complete(watched))
        self.watches.append(watch)

    async def _watch(self, watched: _Watched, job: str) -> None:
        try:
            async for update in self.target.watch(job):
                self.progress(update)
                watched.state = update.state or watched.state
                if update.tokens:
                    watched.trained.append((self.now(), update.tokens))
        except (CoserveError, OSError) as failure:
            watched.fail(failure)

    def _complete(self, watched: _Watched) -> None:
        self.jobs.append(watched.sample())
        self.observe(self.jobs[-1])

    async def probe(self, ask: Probe, interval: float) -> None:
        """Read gauges every `interval` seconds; those that cannot be read are left out."""
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
            except (CoserveError, OSError):  # it has ended in the meantime, or no server answers
                continue


def _wrong_length(arrival: PromptArrival, tokens: int, usage: Usage | None) -> tuple[str | None, str | None]:
    """Return code and message for a complete answer of a wrong length; None and None if it is right. A short answer is
    detected only by the server's usage."""
    if not tokens:
        return "no_tokens", "the answer has no tokens"
    if usage is None or usage.output_tokens >= arrival.max_tokens:
        return None, None
    reason = "" if usage.finish_reason is None else f" (finish reason: {usage.finish_reason})"
    return "short_answer", f"expected {arrival.max_tokens} tokens, got {usage.output_tokens}{reason}"


def _failure(failure: CoserveError | OSError) -> tuple[str, str]:
    """Return code and message; the message is one line of printable characters."""
    if isinstance(failure, CoserveError):
        code, text = failure.code, str(failure)
    elif isinstance(failure, TimeoutError):
        code, text = "timeout", str(failure) or "no answer in time"
    else:
        code, text = "connection", str(failure) or type(failure).__name__
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 2 * MESSAGE_LENGTH]).split())
    return code, line[:MESSAGE_LENGTH]
