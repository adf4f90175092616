"""Sizes of products, and integer arithmetic for those of grids and blocks. Triton's own functions also work in kernels,
but cost the host microseconds a call."""

from __future__ import annotations

CPU_MIN_ROWS = 16
"""Fewest rows of a product on a CPU: in smaller ones a row's bits depend on the number of rows."""


def cdiv(a: int, b: int) -> int:
    """Return `a / b`, rounded up; b > 0."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is at least n; 1 for n < 1."""
    return 1 << max(n - 1, 0).bit_length()
