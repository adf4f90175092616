"""Latency and throughput metrics of a replay. Pure.

TTFT, TPOT, ITL, E2E and goodput as `vllm bench serve` defines them: TTFT from the arrival to the first token, TPOT the time
after it divided by the tokens after it, ITL every gap between two chunks, E2E from the arrival to the end, goodput the
answers a second within every limit. Inference latency (mean E2E), SLO attainment and fine-tuning tokens a second
as in the ETS paper (section 5.2.3, table 5.2). Failed requests have no latency and attain no SLO.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from coserve.types import JobState, Wire
from coserve.workloads.replay import JobSample, ReplayResult, Sample

PAPER_SLOS = (10.0, 60.0)


class Limits(Wire, frozen=True):
    """Upper limits in seconds of a good answer; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None


class Spread(Wire, frozen=True):
    """Seconds, over `count` values; percentiles are interpolated."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float


class Summary(Wire, frozen=True):
    """Rates are per second of `duration`; a `Spread` is None where there was nothing to measure."""

    duration: float
    requests: int
    completed: int
    errors: dict[str, int]
    request_throughput: float
    output_tokens: int
    output_throughput: float
    limits: Limits
    goodput: float
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2e: Spread | None
    lag: Spread | None
    """How late the replay sent requests; large values mean that the load was not the intended one."""
    slo_attainment: dict[str, float]
    """E2E limit in seconds -> share of all requests within it, 0 to 1."""
    jobs: int
    jobs_succeeded: int
    job_errors: dict[str, int]
    finetune_tokens: int
    finetune_throughput: float


def ttft(sample: Sample) -> float | None:
    return sample.times[0] - sample.due if sample.times else None


def tpot(sample: Sample) -> float | None:
    """None with fewer than two tokens."""
    if sample.tokens < 2:
        return None
    return (sample.times[-1] - sample.times[0]) / (sample.tokens - 1)


def itl(sample: Sample) -> list[float]:
    return [later - earlier for earlier, later in pairwise(sample.times)]


def e2e(sample: Sample) -> float:
    return sample.finished - sample.due


def attains(sample: Sample, limits: Limits) -> bool:
    """Whether an answer is within the limits. An answer of one token has no TPOT and cannot exceed its limit."""
    if sample.error is not None:
        return False
    pairs = ((ttft(sample), limits.ttft), (tpot(sample), limits.tpot), (e2e(sample), limits.e2e))
    return all(value is None or limit is None or value <= limit for value, limit in pairs)


def spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    p50, p95, p99 = (float(value) for value in np.percentile(values, (50, 95, 99)))
    return Spread(count=len(values), mean=float(np.mean(values)), p50=p50, p95=p95, p99=p99)


def trained_until(jobs: Sequence[JobSample], time: float) -> int:
    """Tokens of the optimizer steps that were reported up to `time`."""
    return sum(tokens for job in jobs for at, tokens in job.trained if at <= time)


def summarise(run: ReplayResult, *, slos: Sequence[float] = PAPER_SLOS, limits: Limits = Limits()) -> Summary:  # noqa: B008  # frozen
    """The numbers of a run; `slos` are E2E limits in seconds, `limits` are those of the goodput."""
    good = [sample for sample in run.samples if sample.error is None]
    seconds = max(run.duration, 1e-9)
    tokens = sum(sample.tokens for sample in good)
    trained = trained_until(run.jobs, run.duration)
    return Summary(
        duration=run.duration,
        requests=len(run.samples),
        completed=len(good),
        errors=dict(Counter(sample.error for sample in run.samples if sample.error is not None)),
        request_throughput=len(good) / seconds,
        output_tokens=tokens,
        output_throughput=tokens / seconds,
        limits=limits,
        goodput=sum(attains(sample, limits) for sample in run.samples) / seconds,
        ttft=spread([value for sample in good if (value := ttft(sample)) is not None]),
        tpot=spread([value for sample in good if (value := tpot(sample)) is not None]),
        itl=spread([gap for sample in good for gap in itl(sample)]),
        e2e=spread([e2e(sample) for sample in good]),
        lag=spread([sample.sent - sample.due for sample in run.samples]),
        slo_attainment={f"{slo:g}": attainment(run.samples, slo) for slo in slos},
        jobs=len(run.jobs),
        jobs_succeeded=sum(job.state is JobState.SUCCEEDED for job in run.jobs),
        job_errors=dict(Counter(job.error for job in run.jobs if job.error is not None)),
        finetune_tokens=trained,
        finetune_throughput=trained / seconds,
    )


def attainment(samples: Sequence[Sample], slo: float) -> float:
    """The share of all requests, failed ones included, that ended within `slo` seconds; 1 where there were none."""
    if not samples:
        return 1.0
    return sum(attains(sample, Limits(e2e=slo)) for sample in samples) / len(samples)
