"""Selection of the jobs that train together in one forward and backward. Pure: no torch, no IO, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Size of a micro-batch."""

    tokens: int
    rows: int


@dataclass(frozen=True)
class BatchLimits:
    """Most tokens and rows of one training forward. `rows`: None: unlimited."""

    tokens: int
    rows: int | None = None


def companions(first: Size, others: Iterable[tuple[str, Size]], limits: BatchLimits) -> list[str]:
    """Return the jobs whose micro-batches join `first` in one forward: in their scheduling order, each that still fits.

    A micro-batch is never cut, so a job's batches and dropout do not depend on which jobs share the forward.
    """
    tokens, rows, found = first.tokens, first.rows, list[str]()
    for job, size in others:
        if tokens + size.tokens <= limits.tokens and (limits.rows is None or rows + size.rows <= limits.rows):
            tokens, rows = tokens + size.tokens, rows + size.rows
            found.append(job)
    return found
