"""Latency over time and engine stalls by cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.common.metrics import metric_values
from benchmarks.common.results import Target
from coserve.workloads.replay import Sample

FILE = "stalls.json"
STALL = "coserve_engine_stall_seconds"
TARGETS = {
    "start.cold.ready_s": 75.0,
    "start.cold.ttft_p99_ms": 300.0,
    "start.cold.max_gap_ms": 100.0,
    "start.warm.ready_s": 20.0,
    "start.warm.ttft_p99_ms": 300.0,
    "start.warm.max_gap_ms": 100.0,
    "stall.jobs.max_gap_ms": 100.0,
    "stall.jobs.ttft_p99_ms": 300.0,
    "stall.jobs.ft_cost": 0.05,
    "stall.churn.max_gap_ms": 60.0,
}
"""At most."""
COLD_RANKS = 90.0
"""`start.cold.ready_s` of several GPUs."""


def key_of(key: str, kind: str | None) -> str:
    """The key under a policy, or on several GPUs, that is named."""
    first, _, rest = key.partition(".")
    return key if kind is None else f"{first}.{kind}.{rest}"


def target(key: str, tp: int = 1) -> Target | None:
    if tp > 1 and key == "start.cold.ready_s":
        return Target(COLD_RANKS, most=True)
    return Target(TARGETS[key], most=True) if key in TARGETS else None


def ttft(sample: Sample) -> float:
    """Seconds to the first token; of a request that got none, the seconds until it ended."""
    return (sample.times[0] if sample.times else sample.finished) - sample.due


def gaps(sample: Sample) -> list[tuple[float, float]]:
    """End and length of each gap between chunks of a stream, in seconds."""
    return [(later, later - earlier) for earlier, later in pairwise(sample.times)]


def latency(samples: Sequence[Sample]) -> dict[str, Any]:
    """Milliseconds over all samples, failed ones included."""
    waits = [ttft(sample) * 1e3 for sample in samples]
    lengths = [length * 1e3 for sample in samples for _, length in gaps(sample)]
    errors = [sample.error for sample in samples if sample.error is not None]
    found: dict[str, Any] = {"requests": len(samples)}
    found |= {"errors": {error: errors.count(error) for error in sorted(set(errors))}}
    for name, values, percentiles in (("ttft", waits, (50, 99)), ("gap", lengths, (50, 99, 99.9))):
        found |= {f"{name}_p{p:g}_ms": round(float(np.percentile(values or [0.0], p)), 1) for p in percentiles}
    found |= {"ttft_max_ms": round(max(waits, default=0.0), 1), "max_gap_ms": round(max(lengths, default=0.0), 1)}
    return found


def timeline(samples: Sequence[Sample], shift: float = 0.0) -> list[list[float]]:
    """One row a second: second, requests due in it, their largest TTFT in ms, the longest gap that ended in it in ms.

    `shift`: seconds from the timeline's zero to that of the samples. Seconds without requests and gaps are left out.
    """
    waits, lengths = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    for sample in samples:
        waits[int(sample.due + shift)].append(ttft(sample))
        for end, length in gaps(sample):
            lengths[int(end + shift)].append(length)

    def worst(values: Sequence[float]) -> float:
        return round(max(values, default=0.0) * 1e3, 1)

    return [
        [second, len(waits[second]), worst(waits[second]), worst(lengths[second])]
        for second in sorted(waits.keys() | lengths.keys())
    ]


def trained_tokens(before: str, after: str) -> float:
    """Tokens of fine-tuning between two Prometheus pages."""
    name = "coserve_train_tokens_total"
    return sum(metric_values(after, name).values()) - sum(metric_values(before, name).values())


def stalls(before: str, after: str) -> dict[str, dict[str, Any]]:
    """Engine stalls between two Prometheus pages, by cause: count, seconds, and counts by upper bound in seconds."""
    found = defaultdict[str, dict[str, Any]](dict)
    for part, name in (("count", "count"), ("seconds", "sum")):
        old = metric_values(before, f"{STALL}_{name}")
        for labels, value in metric_values(after, f"{STALL}_{name}").items():
            found[dict(labels).get("cause", "")][part] = round(value - old.get(labels, 0.0), 4)
    old, cumulative = metric_values(before, f"{STALL}_bucket"), defaultdict[str, list[tuple[float, float]]](list)
    for labels, value in metric_values(after, f"{STALL}_bucket").items():
        names = dict(labels)
        cumulative[names.get("cause", "")].append((float(names["le"]), value - old.get(labels, 0.0)))
    for cause, bounds in cumulative.items():
        ordered = sorted(bounds)
        counts = [ordered[0][1], *(more - fewer for (_, fewer), (_, more) in pairwise(ordered))]
        found[cause]["buckets"] = {f"{le:g}": int(n) for (le, _), n in zip(ordered, counts, strict=True) if n}
    return {cause: row for cause, row in sorted(found.items()) if row.get("count")}


def allocations(before: str, after: str) -> dict[str, float]:
    """Calls of the allocators of GPU and pinned memory between two Prometheus pages."""
    names = ("cuda_alloc", "cuda_free", "cuda_alloc_retries", "pinned_alloc")
    pages = [
        {n: metric_values(page, f"coserve_engine_{n}_total").get((), 0.0) for n in names} for page in (before, after)
    ]
    return {name: pages[1][name] - pages[0][name] for name in names}


def cost(checkpoints: Sequence[float], none: Sequence[float]) -> float | None:
    """Share of the fine-tuning tokens a second that checkpoints take. `checkpoints`, `none`: tokens a second with and
    without them, of equally many blocks. None where nothing was trained without them."""
    if not checkpoints or not sum(none):
        return None
    return round(1 - float(np.mean(checkpoints)) / float(np.mean(none)), 4)


def check_answers(samples: Sequence[Sample]) -> None:
    """Raises `SystemExit` if more than 1% of the requests failed: latencies of the others would mean nothing."""
    errors = [sample.error for sample in samples if sample.error is not None]
    if len(errors) > len(samples) // 100:
        raise SystemExit(f"{len(errors)} of {len(samples)} requests failed: {', '.join(sorted(set(errors)))}")


def worst(rows: Mapping[str, Mapping[str, float | None]], name: str) -> float | None:
    """The largest value over the rates; None where one of them has none."""
    values = [row[name] for row in rows.values()]
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None
