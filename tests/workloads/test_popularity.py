"""Shares of adapters and the draws that follow them."""

import random
from collections import Counter
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.core.errors import InvalidRequest
from coserve.workloads.popularity import Popularity, Shape, choices, shares

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
