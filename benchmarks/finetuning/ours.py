"""coserve's side: the daemon's trainer, and what its suspensions cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from itertools import pairwise

import torch

from benchmarks.common.llama import random_model
from benchmarks.common.timing import synchronize
from benchmarks.ets.figure_5_1_trainer import Jobs
from benchmarks.finetuning.cases import RANK, RECOMPUTED, SEED, Case, Shape
from coserve.core.training.micro_step import MicroStep
from coserve.model.base import Base, wrap_base
from coserve.model.fused import FusedBase

MICRO_BATCHES = 3
"""Of the step whose suspensions are measured: at 4096 tokens each, it is suspended more than 200 times."""
REPEATS = 5


def make_base(shape: Shape) -> Base:
    base = wrap_base(random_model(shape.config(), shape.device, SEED), name=f"{shape.name}-random")
    FusedBase(base, compiled=False)  # stacks the weights as in the daemon
    return base


def backend_of(base: Base) -> str:
    return "segmented" if base.device.type == "cuda" else "grouped"


def running_jobs(base: Base, shape: Shape, case: Case, *, micro_batches: int = 1) -> Jobs:
    """The case's jobs in a trainer. `micro_batches` of a step."""
    return Jobs(
        base,
        backend_of(base),
        length=case.length,
        batch=case.batch,
        ranks=[RANK] * case.jobs,
        rows=case.rows * micro_batches,
        targets=shape.targets,
        recomputed=recomputed(shape, case),
    )


def recomputed(shape: Shape, case: Case) -> int:
    """Layers that a backward computes again."""
    return round(RECOMPUTED * shape.layers) if case.recompute else 0


def suspended(base: Base, shape: Shape, case: Case) -> tuple[list[float], int]:
    """What it costs to suspend a step after each micro-step, as the daemon does where requests leave it no more time:
    the device is waited for each time. Shares of the time of the same step without, and how often it is suspended."""
    with running_jobs(base, shape, case, micro_batches=MICRO_BATCHES) as jobs:
        whole, cut, slices = list[float](), list[float](), 0
        for run in range(REPEATS + 2):
            synchronize(base.device)
            began = time.perf_counter()
            jobs.train(run)
            synchronize(base.device)
            half = time.perf_counter()
            slices = sum(1 for _ in jobs.slices(1))
            synchronize(base.device)
            if run > 1:
                whole.append(half - began)
                cut.append(time.perf_counter() - half)
    return [each / once - 1 for each, once in zip(cut, whole, strict=True)], slices - 1


def slice_times(base: Base, shape: Shape, case: Case) -> tuple[list[float], dict[MicroStep, float]]:
    """Milliseconds of the longest micro-step of each repeat, and of each kind of micro-step the longest median over the
    repeats."""
    with running_jobs(base, shape, case) as jobs:
        for run in range(3):
            jobs.train(run)
        repeats = [_timed_slices(base, jobs.slices(1)) for _ in range(REPEATS)]
    longest = dict[MicroStep, float]()
    for same in zip(*repeats, strict=True):
        kind, middle = same[0][0], statistics.median(ms for _, ms in same)
        longest[kind] = max(middle, longest.get(kind, 0.0))
    return [max(ms for _, ms in repeat) for repeat in repeats], longest


def _timed_slices(base: Base, slices: Iterator[MicroStep]) -> list[tuple[MicroStep, float]]:
    """Milliseconds of each slice: on a GPU between two events of the device."""
    kinds = list[MicroStep]()
    if base.device.type != "cuda":
        times = list[float]()
        for kind in slices:
            kinds.append(kind)
            times.append(1e3 * time.perf_counter())
        times.append(1e3 * time.perf_counter())
        return [(kind, end - begin) for kind, (begin, end) in zip(kinds, pairwise(times), strict=True)]
    events = list[torch.cuda.Event]()

    def mark() -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        events.append(event)

    for kind in slices:
        kinds.append(kind)
        mark()
    mark()
    torch.cuda.synchronize()
    spans = [float(begin.elapsed_time(end)) for begin, end in pairwise(events)]
    return list(zip(kinds, spans, strict=True))
