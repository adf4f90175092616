from __future__ import annotations

import pytest

from coserve.kernels.lora.segments import Segments


def test_runs_join_neighbours_and_drop_empty_segments() -> None:
    segments = Segments((0, 2, 2, 3, 5, 6, 6), (0, 1, 0, -1, 0, 1))
    assert segments.runs == {0: [(0, 3), (5, 6)]}
    assert segments.tokens == 6


@pytest.mark.parametrize(("bounds", "adapters"), [((0, 1), ()), ((1, 2), (0,)), ((0, 2, 1), (0, 1))])
def test_bounds_that_cannot_be_are_refused(bounds: tuple[int, ...], adapters: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        Segments(bounds, adapters)
