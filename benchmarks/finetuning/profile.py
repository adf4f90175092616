"""Where the time of a batch goes, by kind of work."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from benchmarks.common.traces import Kernel, busy, traced
from benchmarks.ets.figure_5_1_trainer import Jobs
from coserve.core.training.micro_step import MicroStep
from coserve.model.base import Base

EVERYTHING = 1 << 20
"""Micro-steps of a slice: all of its kind that follow one another."""
KINDS = (
    ("copies", r"^Mem(cpy|set)"),
    ("attention", r"flash|fmha|attention|softmax_warp"),
    ("recurrence", r"^(prepare|solve|scan|output|inputs)(_|$)"),
    ("lora", r"^(shrink|expand|outer|fold|finish)(_|$)"),
    ("gemm", r"gemm|nvjet|cutlass|cublas|xmma|gemv|splitK|_mm_|\bmm\b"),
)
"""Kinds of work by the names of kernels, the first that fits; others are elementwise. Those of the head and of the
optimizer count as theirs."""
LISTED = 25
"""Kernels of a profile that are listed by name."""


def kind_of(name: str, step: MicroStep) -> str:
    """Of a kernel that ran in a micro-step of that kind."""
    if step is MicroStep.HEAD:
        return "head"
    if step is MicroStep.OPTIMIZER:
        return "optimizer"
    return next((kind for kind, names in KINDS if re.search(names, name)), "elementwise")


def by_kind(kernels: list[tuple[MicroStep, list[Kernel]]], step_ms: float) -> dict[str, Any]:
    """Milliseconds of each kind of work and its launches. `step_ms`: of the batch without a profiler: what no kernel
    covers are gaps."""
    times, launches, names = defaultdict[str, float](float), defaultdict[str, int](int), defaultdict[str, float](float)
    covered = 0.0
    for step, own in kernels:
        covered += busy(own) / 1e3
        for kernel in own:
            kind = kind_of(kernel.name, step)
            times[kind] += (kernel.end - kernel.start) / 1e3
            launches[kind] += 1
            names[f"{kind}: {kernel.name[:80]}"] += (kernel.end - kernel.start) / 1e3
    largest = sorted(names.items(), key=lambda item: -item[1])[:LISTED]
    return {
        "step_ms": round(step_ms, 3),
        "busy_ms": round(covered, 3),
        "gaps_ms": round(max(0.0, step_ms - covered), 3),
        "launches": sum(launches.values()),
        "ms": {kind: round(ms, 3) for kind, ms in sorted(times.items())},
        "launches_by_kind": dict(sorted(launches.items())),
        "largest_ms": {name: round(ms, 3) for name, ms in largest},
    }


def profiled(base: Base, jobs: Jobs, step_ms: float) -> dict[str, Any] | None:
    """The profile of one batch; None without a GPU. Micro-steps of a kind are traced together, and only on the
    device."""
    if base.device.type != "cuda":
        return None
    found = list[tuple[MicroStep, list[Kernel]]]()
    slices = jobs.slices(EVERYTHING)
    upcoming = next(slices, None)

    def run() -> None:
        nonlocal upcoming
        upcoming = next(slices, None)

    while upcoming is not None:
        kind = upcoming
        found.append((kind, traced(run, base.device, host=False)))
    return by_kind(found, step_ms)
