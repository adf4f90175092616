"""What a trace says: who adds what to a layer, and how long anything ran."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ets.figure_5_1_trace import Kernel, added, busy, layers_of


def test_side_by_side_nothing_counts_twice() -> None:
    """As products, shrinks and expands overlap in a decode step; and a gap belongs to the kernel behind it."""
    step = [
        Kernel("norm", 0.0, 2.0),
        Kernel("decode", 1.0, 7.0),
        Kernel("project", 6.0, 12.0),
        Kernel("shrink", 8.0, 11.0),
        Kernel("expand", 9.0, 14.0),
        Kernel("decode", 15.0, 20.0),
        Kernel("norm", 19.0, 22.0),
        Kernel("decode", 23.0, 24.0),
    ]
    assert [us for _, us in added(step)] == [2.0, 5.0, 5.0, 0.0, 2.0, 6.0, 2.0, 2.0]
    assert layers_of(step) == [
        {"00.decode": 5.0, "01.project": 5.0, "02.shrink": 0.0, "03.expand": 2.0},
        {"00.decode": 6.0, "01.norm": 2.0},
    ]
    assert busy(step) == 22.0
    assert layers_of([]) == []
    assert busy([]) == 0.0


spans = st.tuples(st.integers(0, 50), st.integers(1, 20)).map(lambda at: Kernel("k", at[0], at[0] + at[1]))


@given(st.lists(spans, min_size=1))
def test_they_add_up(kernels: list[Kernel]) -> None:
    first, last = min(kernel.start for kernel in kernels), max(kernel.end for kernel in kernels)
    assert sum(us for _, us in added(kernels)) == pytest.approx(last - first)
    covered = {tick for kernel in kernels for tick in range(int(kernel.start), int(kernel.end))}
    assert busy(kernels) == pytest.approx(len(covered))
