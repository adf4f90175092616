"""Arrival processes: right times, right rates, right burstiness, the same for the same seed."""

import itertools
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.errors import InvalidRequest
from coserve.workloads.arrivals import Arrivals, Process, arrival_times

RATES = st.floats(0.1, 50)
ARRIVALS = st.builds(Arrivals, process=st.sampled_from(Process), rate=RATES, cv=st.floats(0.3, 3))


@given(ARRIVALS, st.floats(0.01, 20), st.integers(0, 2**32))
def test_times_ascend_inside_the_duration_and_repeat_by_seed(arrivals: Arrivals, duration: float, seed: int) -> None:
    times = list(arrival_times(arrivals, duration, random.Random(seed)))
    assert times == sorted(times)
    assert all(0 <= time < duration for time in times)
    assert times == list(arrival_times(arrivals, duration, random.Random(seed)))


@given(ARRIVALS, st.floats(0.01, 10), st.floats(0.01, 10), st.integers(0, 2**32))
def test_a_shorter_run_is_the_beginning_of_a_longer_one(arrivals: Arrivals, a: float, b: float, seed: int) -> None:
    short, long = (list(arrival_times(arrivals, d, random.Random(seed))) for d in sorted((a, b)))
    assert long[: len(short)] == short


def test_constant_arrivals_stand_on_the_grid() -> None:
    times = list(arrival_times(Arrivals(rate=10), 0.55, random.Random(0)))
    assert times == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])


@pytest.mark.parametrize(
    ("process", "cv", "variation"),
    [(Process.POISSON, 1.0, 1.0), (Process.GAMMA, 1.0, 1.0), (Process.GAMMA, 0.5, 0.5), (Process.GAMMA, 2.5, 2.5)],
)
def test_gaps_have_the_mean_and_the_variation_asked_for(process: Process, cv: float, variation: float) -> None:
    arrivals = Arrivals(process=process, rate=4.0, cv=cv)
    times = list(arrival_times(arrivals, 5000, random.Random(1)))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(1 / 4, rel=0.06)
    assert statistics.pstdev(gaps) / mean == pytest.approx(variation, rel=0.08)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["rate", "cv"])
def test_impossible_processes_are_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match="expected a number above 0") as caught:
        Arrivals(**{name: value})
    assert caught.value.field == f"arrivals.{name}"
