"""Least-squares lines through the sizes of one series, and their errors."""

from __future__ import annotations

from collections.abc import Sequence

from coserve.core.types import Wire


class Line(Wire, frozen=True):
    """Bytes as a linear function of rows: `fixed + per_row * rows`."""

    fixed: float
    per_row: float
    per_token: float
    """`per_row` divided by the tokens of a row."""
    r2: float
    """Coefficient of determination; 1 if all sizes gave the same number."""
    worst_error: float | None
    """Largest |line - reading| / reading over the sizes with a reading above 0; None if there is none."""

    def at(self, rows: int) -> float:
        return self.fixed + self.per_row * rows


def fit_line(samples: Sequence[tuple[int, int]], tokens: int) -> Line | None:
    """Fit a line through (rows, bytes), for rows of `tokens` tokens; None for fewer than two distinct sizes."""
    n = len(samples)
    if len({rows for rows, _ in samples}) < 2:
        return None
    x, y = sum(rows for rows, _ in samples) / n, sum(size for _, size in samples) / n
    spread = sum((rows - x) ** 2 for rows, _ in samples)
    slope = sum((rows - x) * (size - y) for rows, size in samples) / spread
    fixed = y - slope * x
    errors = [(fixed + slope * rows - size, size) for rows, size in samples]
    total = sum((size - y) ** 2 for _, size in samples)
    left = sum(error**2 for error, _ in errors)
    return Line(
        fixed=fixed,
        per_row=slope,
        per_token=slope / tokens,
        r2=1 - left / total if total else 1.0,
        worst_error=max((abs(error) / size for error, size in errors if size > 0), default=None),
    )
