"""The share of time in which the GPU is idle while the engine decodes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch._C._autograd import DeviceType

from benchmarks.common.traces import by_kernel, kernels_of
from benchmarks.serving.case import Bench, Load

WARM, STEPS = 40, 150
"""Steps before the measured window, and in it."""
SHORT = 5.0
"""µs: gaps up to this are those between the kernels of one graph."""


@dataclass(frozen=True)
class Idle:
    """Of one window of decode steps."""

    idle: float
    """The fraction of the window in which nothing ran on the device: between steps, and between a graph's kernels."""
    short: float
    """The part of it in gaps of at most `SHORT` µs."""
    steps: int
    step_ms: float
    step_ms_unprofiled: float
    """The same steps without tracing, which lengthens the gaps between a graph's kernels."""
    idle_unprofiled: float
    """Idle share of the untraced step, with the kernel time of the trace; exact to one step in `steps`."""
    longest_us: float
    kernels: list[tuple[float, float, str]] = field(default_factory=list)
    """µs and calls a step of the kernels that take longest, by name."""

    def about(self) -> dict[str, object]:
        found = {name: value for name, value in vars(self).items() if name not in ("idle", "kernels")}
        return found | {"short_gap_us": SHORT}


class Window:
    """Times, and profiles if asked to, from the first to the last of two counts of output tokens."""

    def __init__(self, first: int, last: int, profiler: torch.profiler.profile | None) -> None:
        self._first, self._last, self._profiler = first, last, profiler
        self._began = self.seconds = 0.0

    def saw(self, tokens: int) -> None:
        if tokens >= self._first and not self._began:
            if self._profiler is not None:
                self._profiler.start()
            self._began = time.perf_counter()
        if tokens >= self._last and not self.seconds:
            self.seconds = time.perf_counter() - self._began
            if self._profiler is not None:
                self._profiler.stop()


async def measure(bench: Bench, load: Load) -> Idle:
    """Through the engine and its link."""
    steps = min(STEPS, load.output // 3)
    first = load.requests * min(WARM, load.output // 3)
    last = first + load.requests * steps
    assert steps > 0, f"expected some steps, got an output of {load.output}"
    activity = torch.profiler.ProfilerActivity
    kind = activity.CUDA if bench.shape.device == "cuda" else activity.CPU
    name = f"idle.b{load.requests}.a{load.adapters}"
    with torch.profiler.profile(activities=[kind]):  # its own start-up is not for the window
        await bench.serve(load.make_requests(f"{name}/warm", bench.shape.vocab))
    plain = Window(first, last, None)
    await bench.serve(load.make_requests(f"{name}/plain", bench.shape.vocab), plain.saw)
    profiler = torch.profiler.profile(activities=[kind])
    traced = Window(first, last, profiler)
    await bench.serve(load.make_requests(f"{name}/traced", bench.shape.vocab), traced.saw)
    device = DeviceType.CUDA if bench.shape.device == "cuda" else DeviceType.CPU
    kernels = kernels_of(profiler, device)
    return replace(
        idle_of([(each.start, each.end) for each in kernels], steps, plain.seconds / steps),
        kernels=by_kernel(kernels, steps),
    )


def idle_of(spans: Sequence[tuple[float, float]], steps: int, plain_step: float) -> Idle:
    """`spans`: when each kernel or copy ran, µs. `plain_step`: seconds of a step that is not traced."""
    assert spans, "expected the trace to hold kernels"
    merged = list[list[float]]()
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    gaps: list[float] = [after[0] - before[1] for before, after in pairwise(merged)]
    window = merged[-1][1] - merged[0][0]
    busy = sum(end - start for start, end in merged)
    return Idle(
        idle=round(1 - busy / window, 4),
        short=round(sum(gap for gap in gaps if gap <= SHORT) / window, 4),
        steps=steps,
        step_ms=round(window / steps / 1e3, 4),
        step_ms_unprofiled=round(plain_step * 1e3, 4),
        idle_unprofiled=round(1 - busy / steps / (plain_step * 1e6), 4),
        longest_us=round(max(gaps, default=0.0), 1),
    )
