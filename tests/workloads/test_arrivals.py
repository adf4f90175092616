"""Arrival processes: right times, right rates, right burstiness, the same for the same seed; and the adapters that they
ask for: their shares, and the draws that follow them."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import Counter
from itertools import islice, pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.core.errors import InvalidRequest
from coserve.workloads.arrivals import Arrivals, Pattern, Process, arrival_times
from coserve.workloads.distributions import Popularity, Shape, choices, shares

RATES = st.floats(0.1, 50)
ARRIVALS = st.builds(Arrivals, process=st.sampled_from(Process), rate=RATES, cv=st.floats(0.3, 3))


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
    with pytest.raises(InvalidRequest, match=r"expected at (least|most)") as caught:
        Arrivals(**{name: value})
    assert caught.value.field == f"arrivals.{name}"


@pytest.mark.parametrize("process", list(Process))
@pytest.mark.parametrize(
    ("arrivals", "bounds", "expected"),
    [
        (Arrivals(rate=30, pattern=Pattern.ON_OFF, on_seconds=4, off_seconds=6), (0, 4, 10, 14, 20), (120, 0, 120, 0)),
        (
            Arrivals(rate=30, pattern=Pattern.ON_OFF, on_seconds=5, off_seconds=5, off_rate=10),
            (0, 5, 10, 15, 20),
            (150, 50, 150, 50),
        ),
        (Arrivals(rate=10, pattern=Pattern.RAMP, ramp_rate=50), (0, 10, 20), (200, 400)),
        (Arrivals(rate=50, pattern=Pattern.RAMP, ramp_rate=0), (0, 10, 20), (375, 125)),
    ],
)
def test_the_rate_follows_its_pattern(
    process: Process, arrivals: Arrivals, bounds: tuple[float, ...], expected: tuple[int, ...]
) -> None:
    """Counts between the bounds, the mean of ten runs; a constant process keeps them to the request."""
    arrivals = msgspec.structs.replace(arrivals, process=process)
    runs = 1 if process is Process.CONSTANT else 10
    times = [time for run in range(runs) for time in arrival_times(arrivals, bounds[-1], random.Random(run))]
    for (begin, end), count in zip(itertools.pairwise(bounds), expected, strict=True):
        found = sum(begin <= time < end for time in times) / runs
        assert found == pytest.approx(count, abs=1.5 if runs == 1 else 5 * (count / runs) ** 0.5)


@given(
    st.builds(
        Arrivals,
        process=st.sampled_from(Process),
        rate=RATES,
        cv=st.floats(0.3, 3),
        pattern=st.sampled_from(Pattern),
        on_seconds=st.floats(0.1, 5),
        off_seconds=st.floats(0.1, 5),
        off_rate=st.floats(0, 5),
        ramp_rate=st.floats(0, 50),
    ),
    st.floats(0.1, 10),
    st.integers(0, 2**32),
    st.sampled_from([None, 0.0, 0.01, 0.5]),
)
def test_times_ascend_inside_the_duration_and_repeat_by_seed_whatever_the_pattern(
    arrivals: Arrivals, duration: float, seed: int, share: float | None
) -> None:
    times = list(arrival_times(arrivals, duration, random.Random(seed), share=share))
    assert times == list(arrival_times(arrivals, duration, random.Random(seed), share=share))
    assert times == sorted(times) and all(0 <= time < duration for time in times)
    assert not (share == 0.0 and times)
    most = max(arrivals.rate, arrivals.off_rate, arrivals.ramp_rate) * duration * (1 if share is None else share)
    if arrivals.process is Process.CONSTANT:
        assert len(times) <= most + 1


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_a_gamma_process_of_any_burstiness_has_its_rate_from_the_first_second(cv: float) -> None:
    """Short runs of many processes, as each adapter has one: bursts bring no more requests, only others at a time."""
    arrivals = Arrivals(process=Process.GAMMA, rate=10.0, cv=cv)
    counts = [
        len(list(arrival_times(arrivals, 5.0, random.Random(f"{cv}/{adapter}"), share=0.02))) for adapter in range(4000)
    ]
    assert statistics.fmean(counts) == pytest.approx(1.0, abs=4 * statistics.pstdev(counts) / 4000**0.5)
    assert abs(statistics.fmean(counts) - 1.0) < 0.12


def test_constant_processes_of_adapters_do_not_all_begin_at_once() -> None:
    arrivals = Arrivals(rate=10.0)
    firsts = [next(arrival_times(arrivals, 1e9, random.Random(i), share=0.1)) for i in range(200)]
    assert 0 <= min(firsts) < 0.1 and 0.9 < max(firsts) < 1.0


@pytest.mark.parametrize("name", ["on_seconds", "off_rate", "ramp_rate"])
def test_impossible_patterns_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        Arrivals(**{name: -1.0})


POPULARITY = st.builds(Popularity, shape=st.sampled_from(Shape), exponent=st.floats(1, 4))


@given(POPULARITY, st.integers(1, 200))
def test_shares_add_up_and_never_rise(popularity: Popularity, adapters: int) -> None:
    parts = shares(popularity, adapters)
    assert len(parts) == adapters
    assert sum(parts) == pytest.approx(1)
    assert all(earlier >= later >= 0 for earlier, later in pairwise(parts))


@given(POPULARITY, st.integers(1, 40), st.integers(0, 2**32))
def test_draws_are_adapters_and_repeat_by_seed(popularity: Popularity, adapters: int, seed: int) -> None:
    drawn = list(islice(choices(popularity, adapters, random.Random(seed)), 50))
    assert set(drawn) <= set(range(adapters))
    assert drawn == list(islice(choices(popularity, adapters, random.Random(seed)), 50))


@pytest.mark.parametrize("shape", Shape)
def test_draws_follow_the_shares(shape: Shape) -> None:
    popularity, n = Popularity(shape=shape), 20_000
    counts = Counter(islice(choices(popularity, 6, random.Random(7)), n))
    for adapter, share in enumerate(shares(popularity, 6)):
        assert counts[adapter] / n == pytest.approx(share, abs=0.015)


def test_distinct_takes_every_adapter_before_any_twice() -> None:
    drawn = list(islice(choices(Popularity(shape=Shape.DISTINCT), 5, random.Random(0)), 10))
    assert sorted(drawn[:5]) == sorted(drawn[5:]) == list(range(5))


def test_skewed_falls_by_a_factor_and_power_law_by_a_power() -> None:
    skewed = shares(Popularity(shape=Shape.SKEWED, exponent=1.5), 4)
    assert [a / b for a, b in pairwise(skewed)] == pytest.approx([1.5] * 3)
    power = shares(Popularity(shape=Shape.POWER_LAW, exponent=2), 3)
    assert [power[0] / share for share in power] == pytest.approx([1, 4, 9])
    assert shares(Popularity(shape=Shape.POWER_LAW, exponent=0), 4) == pytest.approx([0.25] * 4)


def test_identical_is_one_adapter() -> None:
    assert set(islice(choices(Popularity(shape=Shape.IDENTICAL), 9, random.Random(0)), 100)) == {0}


@pytest.mark.parametrize(
    ("shape", "exponent"), [(Shape.SKEWED, 0.9), (Shape.POWER_LAW, -0.1), (Shape.UNIFORM, float("nan"))]
)
def test_an_exponent_that_would_rise_is_refused(shape: Shape, exponent: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Popularity(shape=shape, exponent=exponent)
    assert caught.value.field == "popularity.exponent"
