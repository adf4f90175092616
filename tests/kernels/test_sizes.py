"""Whole blocks and powers of two, as Triton counts them."""

from __future__ import annotations

import triton
from hypothesis import given
from hypothesis import strategies as st

from coserve.kernels.gpu.rounding import cdiv, next_power_of_2


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 20))
def test_cdiv(a: int, b: int) -> None:
    assert cdiv(a, b) == triton.cdiv(a, b)


@given(st.integers(1, 1 << 40))
def test_next_power_of_2(n: int) -> None:
    assert next_power_of_2(n) == triton.next_power_of_2(n)


def test_of_nothing() -> None:
    assert (cdiv(0, 16), next_power_of_2(0)) == (0, 1)
