"""The quantile of the latest values, against a sorted list."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.queues.sliding import SlidingQuantile


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=60),
    st.integers(1, 20),
    st.integers(0, 100),
    st.floats(0, 1e6),
    st.integers(1, 3),
)
def test_it_is_that_of_the_latest_values(values: list[float], size: int, percent: int, bound: float, rank: int) -> None:
    sliding = SlidingQuantile(size)
    for value in values:
        sliding.add(value)
    latest = sorted(values[-size:])
    assert len(sliding) == len(latest)
    found = sliding.at(percent / 100)
    assert found in latest and sum(value > found for value in latest) <= math.floor(
        len(latest) * (100 - percent) / 100 + 1e-6
    )
    assert found == latest[0] or sum(value >= found for value in latest) > len(latest) * (100 - percent) / 100 - 1e-6
    assert sliding.mean == pytest.approx(sum(latest) / len(latest), rel=1e-6, abs=1e-3)
    below = [value for value in latest if value < bound]
    assert sliding.largest_below(bound, rank=rank) == (below[-rank] if len(below) >= rank else None)
