"""Kernels of a GPU as a profiler saw them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch._C._autograd import DeviceType

from benchmarks.common.timing import synchronize

MOST, NAME = 30, 110
"""Kernels that are listed, and characters of their names."""


@dataclass(frozen=True)
class Kernel:
    """One launch as the device ran it; µs."""

    name: str
    start: float
    end: float


def kernels_of(profiler: torch.profiler.profile, device: DeviceType = DeviceType.CUDA) -> list[Kernel]:
    """What ran on a device; on a CPU its operations."""
    own = [event for event in profiler.events() or () if event.device_type == device and not event.is_user_annotation]  # type: ignore[no-untyped-call]
    return [Kernel(event.name, event.time_range.start, event.time_range.end) for event in own]


def traced(call: Callable[[], object], device: torch.device, *, host: bool = True) -> list[Kernel]:
    """The kernels of one call. `host`: its operations are traced too, which lengthens the gaps between kernels."""
    synchronize(device)
    activity = torch.profiler.ProfilerActivity
    own = [activity.CUDA] if device.type == "cuda" else []
    with torch.profiler.profile(activities=[activity.CPU, *own] if host or not own else own) as profiler:
        call()
        synchronize(device)
    return kernels_of(profiler)


def busy(kernels: Sequence[Kernel]) -> float:
    """µs in which at least one of them ran."""
    total, done = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        total += max(0.0, kernel.end - max(kernel.start, done))
        done = max(done, kernel.end)
    return total


def by_kernel(kernels: Sequence[Kernel], steps: int) -> list[tuple[float, float, str]]:
    """Return µs and calls a step of each kernel's name, the largest first."""
    calls, total = Counter(kernel.name for kernel in kernels), defaultdict[str, float](float)
    for kernel in kernels:
        total[kernel.name] += kernel.end - kernel.start
    longest = sorted(total.items(), key=lambda item: -item[1])[:MOST]
    return [(round(us / steps, 1), round(calls[name] / steps, 2), name[:NAME]) for name, us in longest]
