"""Segments of rows, whole blocks and powers of two."""

from __future__ import annotations

import pytest
import triton
from hypothesis import given
from hypothesis import strategies as st

from coserve.kernels.gpu.rounding import cdiv, next_power_of_2
from coserve.kernels.lora.segments import Segments


def test_runs_join_neighbours_and_drop_empty_segments() -> None:
    segments = Segments((0, 2, 2, 3, 5, 6, 6), (0, 1, 0, -1, 0, 1))
    assert segments.runs == {0: [(0, 3), (5, 6)]}
    assert segments.tokens == 6


@pytest.mark.parametrize(("bounds", "adapters"), [((0, 1), ()), ((1, 2), (0,)), ((0, 2, 1), (0, 1))])
def test_bounds_that_cannot_be_are_refused(bounds: tuple[int, ...], adapters: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        Segments(bounds, adapters)


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 20))
def test_cdiv(a: int, b: int) -> None:
    assert cdiv(a, b) == triton.cdiv(a, b)


@given(st.integers(1, 1 << 40))
def test_next_power_of_2(n: int) -> None:
    assert next_power_of_2(n) == triton.next_power_of_2(n)


def test_of_nothing() -> None:
    assert (cdiv(0, 16), next_power_of_2(0)) == (0, 1)
