"""Which jobs train together in one forward and backward. Pure: no torch, no IO, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Of a micro-batch."""

    tokens: int
    rows: int


@dataclass(frozen=True)
class BatchLimits:
    """Most tokens and rows of one training forward. `rows`: None: any number."""

    tokens: int
    rows: int | None = None


def companions(first: Size, others: Iterable[tuple[str, Size]], limits: BatchLimits) -> list[str]:
    """The jobs whose micro-batches join `first` in one forward: in the order of their turns, each that still fits.

    A micro-batch is never cut: so a job's batches, and what its dropout drops, do not depend on its company.
    """
    tokens, rows, found = first.tokens, first.rows, list[str]()
    for job, size in others:
        if tokens + size.tokens <= limits.tokens and (limits.rows is None or rows + size.rows <= limits.rows):
            tokens, rows = tokens + size.tokens, rows + size.rows
            found.append(job)
    return found
