"""Where the time of a step goes: kernels of the GPU, and operations of the host."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._autograd import DeviceType

MOST = 30
"""Names that are listed."""
NAME = 90
"""Characters of a name."""


def profiled(work: Callable[[], object], steps: int, *, host: bool) -> dict[str, Any]:
    """Runs `work`, which does `steps` equal steps, under the profiler. Milliseconds and counts are of one step.

    `busy_ms`: in which a kernel ran; kernels that run at once count once: `on_path` has the share of each by which it
    moves the end of all work on, so that waiting beside others counts nothing; `idle`: what lies between kernels. With
    `host` also operations by their own time on the host, which the profiler lengthens.
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
    spans, kernels = list[tuple[float, float, str]](), defaultdict[str, list[float]](list)
    for event in profiler.events() or ():
        if event.device_type == DeviceType.CUDA:
            span = event.time_range
            spans.append((span.start, span.end, event.name[:NAME]))
            kernels[event.name[:NAME]].append(span.end - span.start)
    path, idle = on_path(spans)
    busy = sum(us for us, _ in path.values())
    found = {"steps": steps, "step_ms": 1e3 * wall / steps, "busy_ms": busy / 1e3 / steps}
    found |= {"kernels": len(spans) / steps}
    return {
        **{name: round(value, 4) for name, value in found.items()},
        "by_kernel": _rows({name: (sum(times), len(times)) for name, times in kernels.items()}, steps),
        "on_path": _rows(path, steps),
        "idle": _rows(idle, steps),
    } | ({"by_operation": _rows(_operations(profiler), steps)} if host else {})


def _operations(profiler: torch.profiler.profile) -> dict[str, tuple[float, int]]:
    return {each.key[:NAME]: (each.self_cpu_time_total, each.count) for each in profiler.key_averages()}


def _rows(found: dict[str, tuple[float, int]], steps: int) -> list[list[Any]]:
    """[name, ms a step, calls a step], the largest first. `found`: microseconds and calls."""
    largest = sorted(found.items(), key=lambda row: -row[1][0])[:MOST]
    return [[name, round(us / 1e3 / steps, 4), round(calls / steps, 2)] for name, (us, calls) in largest]


Spent = dict[str, tuple[float, int]]
"""Microseconds and count by name."""


def on_path(spans: Sequence[tuple[float, float, str]]) -> tuple[Spent, Spent]:
    """Return by how much each kernel moves the end of all work on, and the gaps between kernels, `one -> next`.

    `spans`: first and last microsecond, and name.
    """
    path, idle = Spent(), Spent()

    def add(to: Spent, name: str, us: float) -> None:
        spent, count = to.get(name, (0.0, 0))
        to[name] = spent + us, count + 1

    end, before = float("-inf"), ""
    for first, last, name in sorted(spans):
        if before and first > end:
            add(idle, f"{before[: NAME // 2]} -> {name[: NAME // 2]}", first - end)
        add(path, name, max(0.0, last - max(first, end)))
        if last > end:
            end, before = last, name
    return path, idle
