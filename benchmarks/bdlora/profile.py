"""Where the time of a step goes: kernels of the GPU, and operations of the host."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch._C._autograd import DeviceType

MOST = 30
"""Names that are listed."""
NAME = 90
"""Characters of a name."""


def profiled(work: Callable[[], object], steps: int, *, host: bool) -> dict[str, Any]:
    """Runs `work`, which does `steps` equal steps, under the profiler. Milliseconds and counts are of one step.

    `busy_ms`: in which a kernel ran; kernels that run at once count once. With `host` also operations by their own time
    on the host, which the profiler lengthens.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    if host:
        activities.append(torch.profiler.ProfilerActivity.CPU)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        wall = time.perf_counter() - began
    spans, kernels = list[tuple[float, float]](), defaultdict[str, list[float]](list)
    for event in profiler.events() or ():
        if event.device_type == DeviceType.CUDA:
            span = event.time_range
            spans.append((span.start, span.end))
            kernels[event.name[:NAME]].append(span.end - span.start)
    found = {"steps": steps, "step_ms": 1e3 * wall / steps, "busy_ms": _covered(spans) / 1e3 / steps}
    found |= {"kernels": len(spans) / steps}
    return {
        **{name: round(value, 4) for name, value in found.items()},
        "by_kernel": _rows({name: (sum(times), len(times)) for name, times in kernels.items()}, steps),
    } | ({"by_operation": _rows(_operations(profiler), steps)} if host else {})


def _operations(profiler: torch.profiler.profile) -> dict[str, tuple[float, int]]:
    return {each.key[:NAME]: (each.self_cpu_time_total, each.count) for each in profiler.key_averages()}


def _rows(found: dict[str, tuple[float, int]], steps: int) -> list[list[Any]]:
    """[name, ms a step, calls a step], the largest first. `found`: microseconds and calls."""
    largest = sorted(found.items(), key=lambda row: -row[1][0])[:MOST]
    return [[name, round(us / 1e3 / steps, 4), round(calls / steps, 2)] for name, (us, calls) in largest]


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total
