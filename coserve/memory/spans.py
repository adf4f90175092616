"""Finds a run of pages for a span in the pool. Pure functions of the pages' states."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

EMPTY = 0
"""State of a page without content. A cached page's state is the time at which it became cached: between EMPTY and
IN_USE."""
IN_USE = int(np.iinfo(np.int64).max) - 1
"""State of a single page with references. It may be moved."""
PINNED = IN_USE + 1
"""State of the pages of a span with references. They must not move, as kernels use their addresses."""


def free_run(state: NDArray[np.int64], n: int) -> int | None:
    """Return the first page of the best run of `n` pages without references, or None. `state`: (P) int64.

    The best run is the one whose most recently used page is the oldest; among equals, the highest.
    """
    newest, width = state, 1  # newest[i]: the most recent use among pages i to i + width - 1
    while width < n:
        step = min(width, n - width)
        newest = np.maximum(newest[:-step], newest[step:])
        width += step
    best = int(newest.min())
    return _last(newest == best) if best < IN_USE else None


def cheapest_run(state: NDArray[np.int64], n: int) -> int | None:
    """Return the first page of the run of `n` unpinned pages with the fewest in use, or None; among equals, the
    highest."""
    used, pinned = _sums(state == IN_USE, n), _sums(state == PINNED, n)
    cost = np.where(pinned == 0, used, n + 1)
    best = int(cost.min())
    return _last(cost == best) if best <= n else None


def _sums(of: NDArray[np.bool_], n: int) -> NDArray[np.int64]:
    """(P - n + 1): for each page, how many of the `n` pages from it on are True in `of` (P)."""
    total = np.zeros(len(of) + 1, dtype=np.int64)
    np.cumsum(of, out=total[1:])
    sums: NDArray[np.int64] = total[n:] - total[:-n]
    return sums


def _last(true: NDArray[np.bool_]) -> int:
    return len(true) - 1 - int(np.argmax(true[::-1]))
