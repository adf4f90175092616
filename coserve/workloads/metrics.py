"""Latencies of requests, and their distribution. Pure.

TTFT, TPOT, ITL and E2E are defined as in `vllm bench serve`: TTFT from arrival to the first token, TPOT the time after
the first token divided by the number of tokens after it, ITL every gap between two chunks, E2E from arrival to the end.
Failed requests have no latency and attain no SLO. User satisfaction is S-LoRA's (section 6.1; the curve is that of its
published code).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from coserve.core.types import SloClass, Wire
from coserve.workloads.replay import JobSample, Sample
from coserve.workloads.scenario import Scenario

SATISFACTION_LIMIT = 6.0
"""S-LoRA's TTFT limit in seconds."""


class Limits(Wire, frozen=True):
    """Latency limits of a good answer in seconds; None: no limit. The `batch_` fields apply to requests of the class
    batch, the others to all other requests."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    batch_ttft: float | None = None
    batch_tpot: float | None = None

    @classmethod
    def of(cls, scenario: Scenario) -> Limits:
        return cls(
            ttft=scenario.slo_ttft,
            tpot=scenario.slo_tpot,
            e2e=scenario.slo_e2e,
            batch_ttft=scenario.slo_batch_ttft,
            batch_tpot=scenario.slo_batch_tpot,
        )

    def of_class(self, slo_class: SloClass | None) -> tuple[float | None, float | None, float | None]:
        """Return the TTFT, TPOT and E2E limits of a class. Requests without a class count as interactive."""
        if slo_class == "batch":
            return self.batch_ttft, self.batch_tpot, None
        return self.ttft, self.tpot, self.e2e


class Spread(Wire, frozen=True):
    """Statistics of `count` values, in seconds; percentiles are interpolated."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


def ttft(sample: Sample) -> float | None:
    return sample.times[0] - sample.due if sample.times else None


def tpot(sample: Sample) -> float | None:
    """Return the TPOT in seconds; None with fewer than two tokens."""
    if sample.tokens < 2:
        return None
    return (sample.times[-1] - sample.times[0]) / (sample.tokens - 1)


def itl(sample: Sample) -> list[float]:
    return [later - earlier for earlier, later in pairwise(sample.times)]


def e2e(sample: Sample) -> float:
    return sample.finished - sample.due


def attains(sample: Sample, limits: Limits) -> bool:
    """Return whether an answer is within the limits. An answer of one token has no TPOT and cannot exceed its limit."""
    if sample.error is not None:
        return False
    pairs = zip((ttft(sample), tpot(sample), e2e(sample)), limits.of_class(sample.slo_class), strict=True)
    return all(value is None or limit is None or value <= limit for value, limit in pairs)


def attainment(samples: Sequence[Sample], limits: Limits) -> float:
    """Return the fraction of all requests, failed ones included, within the limits; 1 without requests."""
    if not samples:
        return 1.0
    return sum(attains(sample, limits) for sample in samples) / len(samples)


def ended_within(samples: Sequence[Sample], seconds: float) -> float:
    """Return the fraction of all requests of any class whose E2E latency is at most `seconds`; 1 without requests."""
    if not samples:
        return 1.0
    return sum(sample.error is None and e2e(sample) <= seconds for sample in samples) / len(samples)


def satisfaction(sample: Sample, limit: float) -> float:
    """Return `1 - (TTFT / limit)**2`; 0 beyond the limit or for a failed request."""
    first = ttft(sample)
    if sample.error is not None or first is None:
        return 0.0
    return max(0.0, 1.0 - (first / limit) ** 2)


def mean_satisfaction(samples: Sequence[Sample], limit: float) -> float:
    """Return the mean satisfaction; 1 without requests."""
    return sum(satisfaction(sample, limit) for sample in samples) / len(samples) if samples else 1.0


def spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    p50, p90, p95, p99 = (float(value) for value in np.percentile(values, (50, 90, 95, 99)))
    return Spread(count=len(values), mean=float(np.mean(values)), p50=p50, p90=p90, p95=p95, p99=p99)


def trained_until(jobs: Sequence[JobSample], time: float) -> int:
    """Return the tokens of the optimizer steps that were reported up to `time`."""
    return sum(tokens for job in jobs for at, tokens in job.trained if at <= time)


def peak_speed(jobs: Sequence[JobSample], lead: float) -> float | None:
    """Return fine-tuning tokens per second without requests: from the first step reported in the second half of `lead`
    to the end of `lead`, or to the last step if that is earlier. None with fewer than three steps there.

    A step's tokens are spread over the time since the job's previous one (before the first: since a time as long as the
    second took), since jobs that train side by side report their steps together.
    """
    inside = [at for job in jobs for at, _ in job.trained if lead / 2 <= at <= lead]
    if len(inside) < 3:
        return None
    begin, end = min(inside), min(lead, max(at for job in jobs for at, _ in job.trained))
    tokens = 0.0
    for job in jobs:
        times = [at for at, _ in job.trained]
        starts = [2 * times[0] - times[1], *times] if len(times) > 1 else times
        for start, (at, own) in zip(starts, job.trained, strict=False):
            overlap = max(0.0, min(at, end) - max(start, begin))
            tokens += own * (overlap / (at - start) if at > start else begin < at <= end)
    return tokens / (end - begin) if end > begin else None
