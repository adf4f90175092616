"""Summary statistics of a run. Pure.

Goodput is the number of answers per second within every limit, as in `vllm bench serve`. Inference latency (mean E2E),
SLO attainment and fine-tuning tokens per second are those of the ETS paper (section 5.2.3, table 5.2).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import asdict

from coserve.core.errors import BY_CODE, CoserveError, QueueFull
from coserve.core.training.jobs import JobState
from coserve.core.types import SloClass, Wire
from coserve.workloads import metrics
from coserve.workloads.gauges import Snapshot
from coserve.workloads.replay import JobSample, ReplayResult, Sample

SHORTEST = 1e-9
"""Minimum denominator of a rate, in seconds."""
CLASSES: tuple[SloClass, ...] = ("interactive", "batch")


class Group(Wire, frozen=True, kw_only=True):
    """Statistics of a subset of the requests."""

    requests: int
    completed: int
    attainment: float
    """Fraction of the requests within every limit, 0 to 1; without limits, the fraction answered (`has_limits`)."""
    ttft: metrics.Spread | None
    tpot: metrics.Spread | None
    e2e: metrics.Spread | None


class AdapterSummary(Group, frozen=True, kw_only=True):
    """The requests of one adapter; `adapter` None is the base."""

    adapter: str | None
    satisfaction: float


class ClassSummary(Group, frozen=True, kw_only=True):
    """The requests of one class, against the limits of that class. Requests without a class count as interactive."""

    slo_class: SloClass


class Queue(Wire, frozen=True):
    """Statistics of the server's gauges over the run, means from the beginning of the arrival window to the end of the
    last request; None: it has no such gauge."""

    waiting_mean: float | None
    waiting_most: float | None
    running_mean: float | None
    running_most: float | None
    cache_most: float | None
    memory_most: dict[str, float]
    """Peak GPU memory in bytes by component."""


class Summary(Group, frozen=True, kw_only=True):
    """All statistics of a run; those of a group are of all its requests. Rates of requests and their tokens are per
    second from the beginning of the arrival window to the end of the last request. A `Spread` is None without
    measurements."""

    duration: float
    errors: dict[str, int]
    request_throughput: float
    prompt_tokens: int | None
    """Prompt tokens of the answered requests, counted by the server; None if a count is missing."""
    output_tokens: int
    output_throughput: float
    limits: metrics.Limits
    goodput: float
    satisfaction: float
    """S-LoRA's user satisfaction, the mean over all requests, 0 to 1."""
    itl: metrics.Spread | None
    lag: metrics.Spread | None
    """How late the replay sent requests; large values mean that the load was not as intended."""
    slo_attainment: dict[str, float]
    """Maps an E2E limit in seconds to the fraction of all requests within it, 0 to 1."""
    adapters: tuple[AdapterSummary, ...]
    """Statistics per adapter, lowest attainment first."""
    queue: Queue | None
    """None: gauges were not requested."""
    jobs: int
    jobs_succeeded: int
    job_errors: dict[str, int]
    finetune_tokens: int
    finetune_throughput: float
    """Fine-tuning tokens per second over `duration`."""
    finetune_window_throughput: float
    """Fine-tuning tokens per second of the steps reported inside the arrival window, or the part of it that the run
    lasted."""
    finetune_peak: float | None
    """Fine-tuning tokens per second without requests: given, or measured before the arrival window."""
    finetune_share: float | None
    """`finetune_window_throughput` as a fraction of `finetune_peak`."""
    classes: tuple[ClassSummary, ...] = ()
    """Statistics of each class that was sent."""
    error_messages: dict[str, str] = {}
    """The first message per code in `errors`."""
    job_error_messages: dict[str, str] = {}

    @property
    def has_limits(self) -> bool:
        """Return whether a class that was sent has limits. Without any, attainment and goodput are meaningless."""
        return any(self.limits_of(each.slo_class) for each in self.classes)

    def limits_of(self, slo_class: SloClass) -> dict[str, float]:
        """Return the limits of a class in seconds, by name of the latency."""
        pairs = zip(("TTFT", "TPOT", "E2E"), self.limits.of_class(slo_class), strict=True)
        return {name: limit for name, limit in pairs if limit is not None}

    def class_attainment(self, slo_class: SloClass) -> float | None:
        """Return the attainment of a class; None if no request of it was sent, or it has no limits."""
        found = [each.attainment for each in self.classes if each.slo_class == slo_class]
        return found[0] if found and self.limits_of(slo_class) else None

    @property
    def shed(self) -> int:
        """Return the number of requests answered with 429; they also count as missed."""
        return sum(
            times for code, times in self.errors.items() if issubclass(BY_CODE.get(code, CoserveError), QueueFull)
        )

    @property
    def worst_attainment(self) -> float:
        """Return the lowest attainment of an adapter."""
        return self.adapters[0].attainment if self.adapters else 1.0


def summarise(
    run: ReplayResult,
    *,
    slos: Sequence[float] | None = None,
    limits: metrics.Limits | None = None,
    peak: float | None = None,
) -> Summary:
    """Summarise a run. `slos`: E2E limits in seconds, `limits`: limits of a good answer; None: the scenario's. `peak`:
    fine-tuning tokens per second without requests; None: as measured before the arrival window."""
    slos = run.scenario.slos if slos is None else slos
    limits = metrics.Limits.of(run.scenario) if limits is None else limits
    good = [sample for sample in run.samples if sample.error is None]
    first, last = _request_time(run)
    seconds = max(last - first, SHORTEST)
    tokens = sum(sample.tokens for sample in good)
    counted = [sample.prompt_tokens for sample in good if sample.prompt_tokens is not None]
    trained = metrics.trained_until(run.jobs, run.duration)
    begin, end = run.scenario.window
    end = max(begin, min(end, run.duration))  # without requests at the end of the window, the run ends before it
    window_tokens = metrics.trained_until(run.jobs, end) - metrics.trained_until(run.jobs, begin)
    in_window = window_tokens / max(end - begin, SHORTEST)
    peak = metrics.peak_speed(run.jobs, begin) if peak is None else peak
    return Summary(
        **asdict(_group(run.samples, limits)),
        duration=run.duration,
        errors=dict(Counter(sample.error for sample in run.samples if sample.error is not None)),
        request_throughput=len(good) / seconds,
        prompt_tokens=sum(counted) if len(counted) == len(good) else None,
        output_tokens=tokens,
        output_throughput=tokens / seconds,
        limits=limits,
        goodput=sum(metrics.attains(sample, limits) for sample in run.samples) / seconds,
        satisfaction=metrics.mean_satisfaction(run.samples, limits.ttft or metrics.SATISFACTION_LIMIT),
        itl=metrics.spread([gap for sample in good for gap in metrics.itl(sample)]),
        lag=metrics.spread([sample.sent - sample.due for sample in run.samples]),
        slo_attainment={f"{slo:g}": metrics.ended_within(run.samples, slo) for slo in slos},
        adapters=_adapters(run.samples, limits),
        queue=_queue(run.snapshots, first, last) if run.snapshots else None,
        jobs=len(run.jobs),
        jobs_succeeded=sum(job.state is JobState.SUCCEEDED for job in run.jobs),
        job_errors=dict(Counter(job.error for job in run.jobs if job.error is not None)),
        finetune_tokens=trained,
        finetune_throughput=trained / max(run.duration, SHORTEST),
        finetune_window_throughput=in_window,
        finetune_peak=peak,
        finetune_share=in_window / peak if peak else None,
        classes=_classes(run.samples, limits),
        error_messages=_first_messages(run.samples),
        job_error_messages=_first_messages(run.jobs),
    )


def _request_time(run: ReplayResult) -> tuple[float, float]:
    """Return the beginning of the arrival window, or of an earlier request, and the end of the last request; infinite
    without one."""
    begin = min([run.scenario.window[0], *(sample.due for sample in run.samples)])
    return begin, max((sample.finished for sample in run.samples), default=math.inf)


def _values(samples: Sequence[Sample], of: Callable[[Sample], float | None]) -> list[float]:
    return [value for sample in samples if (value := of(sample)) is not None]


def _adapters(samples: Sequence[Sample], limits: metrics.Limits) -> tuple[AdapterSummary, ...]:
    by_name: dict[str | None, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.adapter, []).append(sample)
    found = [_adapter(name, own, limits) for name, own in by_name.items()]
    return tuple(sorted(found, key=lambda each: (each.attainment, each.adapter or "")))


def _adapter(name: str | None, samples: Sequence[Sample], limits: metrics.Limits) -> AdapterSummary:
    satisfied = metrics.mean_satisfaction(samples, limits.ttft or metrics.SATISFACTION_LIMIT)
    return AdapterSummary(adapter=name, satisfaction=satisfied, **asdict(_group(samples, limits)))


def _group(samples: Sequence[Sample], limits: metrics.Limits) -> Group:
    good = [sample for sample in samples if sample.error is None]
    return Group(
        requests=len(samples),
        completed=len(good),
        attainment=metrics.attainment(samples, limits),
        ttft=metrics.spread(_values(good, metrics.ttft)),
        tpot=metrics.spread(_values(good, metrics.tpot)),
        e2e=metrics.spread(_values(good, metrics.e2e)),
    )


def _classes(samples: Sequence[Sample], limits: metrics.Limits) -> tuple[ClassSummary, ...]:
    found = []
    for slo_class in CLASSES:
        own = [sample for sample in samples if (sample.slo_class or "interactive") == slo_class]
        if own:
            found.append(ClassSummary(slo_class=slo_class, **asdict(_group(own, limits))))
    return tuple(found)


def _first_messages(samples: Iterable[Sample | JobSample]) -> dict[str, str]:
    """Return the first message per error code."""
    found: dict[str, str] = {}
    for sample in samples:
        if sample.error is not None and sample.message:
            found.setdefault(sample.error, sample.message)
    return found


def _queue(snapshots: Sequence[Snapshot], first: float, last: float) -> Queue:
    """`first`, `last`: see `_request_time`."""
    waiting_mean, waiting_most = _gauge([(each.at, each.waiting) for each in snapshots], first, last)
    running_mean, running_most = _gauge([(each.at, each.running) for each in snapshots], first, last)
    memory: dict[str, float] = {}
    for each in snapshots:
        memory |= {name: max(value, memory.get(name, value)) for name, value in each.memory.items()}
    return Queue(
        waiting_mean=waiting_mean,
        waiting_most=waiting_most,
        running_mean=running_mean,
        running_most=running_most,
        cache_most=max((each.cache for each in snapshots if each.cache is not None), default=None),
        memory_most=memory,
    )


def _gauge(
    values: Iterable[tuple[float, float | None]], first: float, last: float
) -> tuple[float | None, float | None]:
    """Return the mean between two times, and the maximum at all times."""
    found = [(at, value) for at, value in values if value is not None]
    between = [value for at, value in found if first <= at <= last]
    return sum(between) / len(between) if between else None, max((value for _, value in found), default=None)
