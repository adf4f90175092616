"""Reads a server's gauges from its `/metrics` page, under coserve's, vLLM's or SGLang's names."""

from __future__ import annotations

import math

from prometheus_client.parser import text_string_to_metric_families

from coserve.core.errors import InternalError
from coserve.core.types import Wire

_NAMES = {
    "waiting": ("coserve_num_requests_waiting", "vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "running": ("coserve_num_requests_running", "vllm:num_requests_running", "sglang:num_running_reqs"),
    "cache": ("coserve_kv_cache_usage_ratio", "vllm:kv_cache_usage_perc", "sglang:token_usage"),
    "jobs": ("coserve_num_jobs_in_engine",),
}
"""The gauges' names, in order of preference."""
_MEMORY = "coserve_memory_"
_PREFIXES = (_MEMORY, *(name for names in _NAMES.values() for name in names))


class Snapshot(Wire, frozen=True):
    """The gauges at one time, in seconds since the replay began. None: the server has no such gauge."""

    at: float
    waiting: float | None = None
    """Requests in the queue."""
    running: float | None = None
    cache: float | None = None
    """Fraction of the KV cache's pages in use, 0 to 1."""
    jobs: float | None = None
    memory: dict[str, float] = {}
    """GPU memory in bytes by component: the gauge's name without `coserve_memory_`."""


def read_snapshot(page: str, at: float) -> Snapshot:
    """Parse a page in Prometheus' text format. Gauges of several engines are summed, fractions of the KV cache
    averaged.

    A gauge that is NaN or infinite is left out. Raises `InternalError` for one that cannot be parsed.
    """
    wanted = "".join(f"{line}\n" for line in page.splitlines() if line.startswith(_PREFIXES))
    try:
        samples = [sample for family in text_string_to_metric_families(wanted) for sample in family.samples]
    except ValueError as error:
        raise InternalError(f"expected gauges in Prometheus' text format, got an error: {error}") from error
    found: dict[str, list[float]] = {}
    for sample in samples:
        if math.isfinite(sample.value):
            found.setdefault(sample.name, []).append(sample.value)
    values = {key: next((found[name] for name in names if name in found), None) for key, names in _NAMES.items()}
    sums = {key: None if own is None else sum(own) for key, own in values.items()}
    if sums["cache"] is not None:
        sums["cache"] /= len(values["cache"] or [0])
    memory = {
        name.removeprefix(_MEMORY).removesuffix("_bytes"): sum(own)
        for name, own in found.items()
        if name.startswith(_MEMORY)
    }
    return Snapshot(at=at, memory=memory, **sums)
