"""Memory readings (ETS paper, section 4.2.2): forward and backward of one workload over batches of chosen sizes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from benchmarks.memory.profile.report import Point, Readings, components_of
from benchmarks.memory.profile.request import Workload
from coserve.finetune.memory_profiling import MemoryMeter, gc_disabled


class Case(Protocol):
    """Forward and backward over one batch, whose inputs and KV pages are allocated already."""

    def no_grad(self) -> None:
        """Run a forward without gradients. Keeps nothing."""
        ...

    def train(self) -> Iterator[None]:
        """Yield after the forward, end after the backward. Keeps nothing afterwards."""
        ...


@dataclass(frozen=True)
class Passes:
    """A workload that is ready to run."""

    case: Callable[[int, int], Case]
    """Makes the case of a batch, given its rows and the tokens of a row."""
    trains: bool
    weights: int
    """Bytes of the base and of the adapter: reading (1)."""
    optimizer: int = 0
    """Further bytes that a job keeps."""
    kv_per_token: int = 0


class Trial(Protocol):
    """A backend with its model loaded."""

    def workload(self, workload: Workload) -> AbstractContextManager[Passes]:
        """Context in which the workload's adapter and optimizer exist. Raises `InvalidRequest` for targets that the
        base does not have."""
        ...


def settled(meter: MemoryMeter) -> int:
    """Bytes held now, after garbage collection."""
    gc.collect()
    return meter.now()


@gc_disabled()
def read(passes: Passes, meter: MemoryMeter, batch: int, length: int) -> Readings:
    """Take the four readings at one size. The meter's peak is reset between them."""
    case = passes.case(batch, length)
    before = meter.now()

    def peak(run: Callable[[], object]) -> int:
        meter.reset()
        run()
        return meter.peak() - before + passes.weights

    no_grad = peak(case.no_grad)
    if not passes.trains:
        return Readings(weights=passes.weights, no_grad=no_grad)
    steps = case.train()
    forward = peak(lambda: next(steps))
    # The peak is not reset here: reading (4) covers forward and backward.
    for _ in steps:
        pass
    return Readings(
        weights=passes.weights,
        no_grad=no_grad,
        forward=forward,
        forward_backward=meter.peak() - before + passes.weights,
    )


def read_points(
    passes: Passes,
    meter: MemoryMeter,
    batches: Sequence[int],
    length: int,
    begin: Callable[[int], None],
    free: Callable[[], None],
    *,
    warm_up: bool,
) -> tuple[list[Point], str | None, int]:
    """Return the points of ascending `batches`, why some are missing, and the bytes that libraries keep from the first
    run on.

    `begin` is called with each size before it is read, `free` between sizes to empty caches. `warm_up`: run the first
    size once before it is read, so that kernels compile and libraries allocate. Running out of memory ends the series.
    """
    points: list[Point] = []
    before, workspace = meter.now(), 0
    for batch in batches:
        begin(batch)
        if warm_up and not points:
            _fits(passes, meter, batch, length)
            free()
            workspace = meter.now() - before
        readings = _fits(passes, meter, batch, length)
        free()
        if readings is None:
            fitted = f"{points[-1].batch} rows fitted" if points else "no size fitted"
            return points, f"out of memory at {batch} rows; {fitted}", workspace
        points.append(Point(batch=batch, readings=readings, components=components_of(readings)))
    return points, None, workspace


def _fits(passes: Passes, meter: MemoryMeter, batch: int, length: int) -> Readings | None:
    """The readings, or None if memory ran out. The error, whose traceback holds tensors, ends here."""
    try:
        return read(passes, meter, batch, length)
    except torch.OutOfMemoryError:
        return None
