"""Where in the pool a span finds room. Pure functions of the pages' states."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLANK = 0
"""The state of a page with nothing in it. Idle pages have the time since when they are, above this and below HELD."""
HELD = int(np.iinfo(np.int64).max) - 1
"""The state of a page that somebody holds, and that may be moved."""
FIXED = HELD + 1
"""The state of a held span's pages: whoever holds them knows their address."""


def gap(state: NDArray[np.int64], n: int) -> int | None:
    """The first of `n` consecutive pages (of P, `state` (P) int64) that nobody holds; None: there are none.

    The one whose newest content is the oldest, so that what was used lately stays; of equals the highest.
    """
    newest, width = state, 1  # the newest among `width` pages from each one on
    while width < n:
        step = min(width, n - width)
        newest = np.maximum(newest[:-step], newest[step:])
        width += step
    best = int(newest.min())
    return _last(newest == best) if best < HELD else None


def crowded(state: NDArray[np.int64], n: int) -> int | None:
    """The first of the `n` consecutive pages that have no fixed one and the fewest held ones; of equals the highest."""
    held, fixed = _sums(state == HELD, n), _sums(state == FIXED, n)
    cost = np.where(fixed == 0, held, n + 1)
    best = int(cost.min())
    return _last(cost == best) if best <= n else None


def _sums(of: NDArray[np.bool_], n: int) -> NDArray[np.int64]:
    """How many of `n` pages from each one on are."""
    total = np.zeros(len(of) + 1, dtype=np.int64)
    np.cumsum(of, out=total[1:])
    sums: NDArray[np.int64] = total[n:] - total[:-n]
    return sums


def _last(true: NDArray[np.bool_]) -> int:
    return len(true) - 1 - int(np.argmax(true[::-1]))
