"""Lines through sizes, and how far they are from what was read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.memory.profile.lines import fit_line
from benchmarks.memory.profile.report import Components, Point, Readings, components_of, lines_of


@given(fixed=st.integers(0, 1 << 34), slope=st.integers(0, 1 << 24), length=st.integers(1, 512))
def test_a_line_is_found_again(fixed: int, slope: int, length: int) -> None:
    line = fit_line([(rows, fixed + slope * rows) for rows in (3, 70, 1000)], length)
    assert line is not None
    assert line.per_row == pytest.approx(slope, rel=1e-6, abs=1e-3)
    assert line.per_token == pytest.approx(slope / length, rel=1e-6, abs=1e-3)
    assert line.at(500) == pytest.approx(fixed + 500 * slope, rel=1e-6, abs=1)
    assert line.worst_error is None or line.worst_error < 1e-4


def test_errors_of_what_is_no_line() -> None:
    """Through (1, 10), (2, 20) and (3, 60) goes y = 25 x - 20: off by 5, 10 and 5."""
    line = fit_line([(1, 10), (2, 20), (3, 60)], 5)
    assert line is not None
    assert (line.fixed, line.per_row, line.per_token) == pytest.approx((-20, 25, 5))
    assert line.r2 == pytest.approx(1 - 150 / 1400)
    assert line.worst_error == pytest.approx(0.5)


def test_readings_of_nothing_have_no_relative_error() -> None:
    line = fit_line([(1, 0), (2, 0)], 1)
    assert line is not None
    assert (line.per_row, line.r2, line.worst_error) == (0, 1, None)


@pytest.mark.parametrize("samples", [[], [(4, 100)], [(4, 100), (4, 101)]])
def test_one_size_is_no_line(samples: list[tuple[int, int]]) -> None:
    assert fit_line(samples, 8) is None


def test_components_are_differences_of_readings() -> None:
    """Section 4.2.2: (1), (2) - (1), (3) - (2), (4) - (3)."""
    found = components_of(Readings(weights=100, no_grad=130, forward=200, forward_backward=210))
    assert found == Components(weights=100, no_grad=30, act=70, backward=10)
    assert found.total == 210
    inference = components_of(Readings(weights=100, no_grad=130))
    assert (inference.act, inference.backward, inference.total) == (None, None, 130)


def test_lines_of_the_components_that_there_are() -> None:
    def point(batch: int) -> Point:
        readings = Readings(weights=100, no_grad=100 + 7 * batch)
        return Point(batch=batch, readings=readings, components=components_of(readings))

    lines = lines_of([point(1), point(5), point(9)], 7)
    assert set(lines) == {"no_grad", "total"}
    assert lines["no_grad"].per_token == pytest.approx(1)
    assert lines["total"].fixed == pytest.approx(100)
