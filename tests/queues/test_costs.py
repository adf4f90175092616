"""What steps and slices are expected to take, from those that were measured, and the quantile of the latest values."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.queues.costs import (
    FIRST_GUESS,
    LEAST_QUANTILE,
    OUTLIER,
    UNKNOWN,
    WINDOW,
    Predictor,
    Predictors,
    Regression,
    Risk,
    SlidingQuantile,
)
from coserve.queues.shapes import STEP_FEATURES, StepShape
from tests.support.shapes import and_prompt

seconds = st.floats(1e-4, 1.0)
outliers = st.floats(0.0, 1e9)
ONE = (1.0, 64.0)


def predicted(samples: list[float]) -> float | None:
    predictor = Predictor(2)
    for sample in samples:
        predictor.add(ONE, sample)
    found = predictor.predict(ONE)
    return None if found is None else found.expected


@given(st.lists(seconds, min_size=1, max_size=20), outliers, st.data())
def test_one_outlier_of_any_size_anywhere_never_shows(
    samples: list[float], outlier: float, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(samples)))
    found = predicted([*samples[:place], outlier, *samples[place:]])
    assert found is not None
    assert found <= max(samples) * (1 + 1e-9)


@given(st.lists(outliers, max_size=20), seconds)
def test_a_lasting_change_is_followed_within_three_samples(before: list[float], after: float) -> None:
    assert predicted([*before, after, after, after]) == pytest.approx(after)


@given(st.lists(outliers, max_size=20), seconds)
def test_a_fall_is_followed_within_two(before: list[float], after: float) -> None:
    found = predicted([*before, after, after])
    assert found is not None
    assert found <= after * (1 + 1e-9)


@given(st.lists(outliers, min_size=2, max_size=20))
def test_a_prediction_is_a_sample_of_the_window(samples: list[float]) -> None:
    found = predicted(samples)
    assert any(found == pytest.approx(sample) for sample in samples[-WINDOW:])


@given(outliers)
def test_a_single_sample_predicts_nothing(sample: float) -> None:
    assert predicted([sample]) is None


def test_kinds_are_learned_apart_and_stand_in_for_each_other() -> None:
    costs = Predictors(2)
    assert costs.predict(ONE, "decode", "prefill") == UNKNOWN
    for _ in range(2):
        costs.add("prefill", ONE, 0.5)
    assert costs.predict(ONE, "decode") == UNKNOWN
    assert costs.predict(ONE, "decode", "prefill").expected == pytest.approx(0.5)
    for _ in range(2):
        costs.add("decode", ONE, 0.1)
    assert costs.predict(ONE, "decode", "prefill").expected == pytest.approx(0.1)
    costs.forget("decode")
    assert costs.predict(ONE, "decode") == UNKNOWN
    assert costs.predict(ONE, "prefill").expected == pytest.approx(0.5)


def test_of_many_kinds_those_measured_longest_ago_are_forgotten() -> None:
    costs = Predictors(2, most=3)
    for kind in "abcacd":
        costs.add(kind, ONE, 0.5)
    for kind in "acd":
        costs.add(kind, ONE, 0.5)
    assert [costs.knows(kind) for kind in "abcd"] == [True, False, True, True]


def step_seconds(shape: StepShape) -> float:
    """About an 8B model: weights, then rows, keys and values, prompts, LoRA."""
    return (
        5e-3
        + 2e-5 * shape.decodes
        + 3e-8 * shape.kv_tokens
        + 2.5e-5 * shape.prefill
        + 2e-9 * shape.pairs
        + 1e-12 * shape.adapter_bytes
    )


def some_shape(rng: random.Random) -> StepShape:
    decodes = rng.randint(0, 64)
    shape = StepShape(decodes, decodes * rng.randint(100, 2000), 0, 0, rng.randint(0, 32) * 80_000_000)
    for _ in range(rng.randint(1, 4)):
        shape = and_prompt(shape, rng.randint(2, 500), rng.choice((0, 0, 1000)))
    return shape


def trained(noise: float, outlier_share: float, samples: int = 1000) -> Predictor:
    rng, predictor = random.Random(0), Predictor(STEP_FEATURES)
    for _ in range(samples):
        shape = some_shape(rng)
        factor = 20.0 if rng.random() < outlier_share else rng.gauss(1.0, noise)
        predictor.add(shape.features, step_seconds(shape) * factor)
    return predictor


def worst_error(predictor: Predictor, slower: float = 1.0) -> float:
    rng, errors = random.Random(1), list[float]()
    for _ in range(200):
        shape = some_shape(rng)
        found = predictor.predict(shape.features)
        assert found is not None
        errors.append(abs(found.expected / (slower * step_seconds(shape)) - 1))
    return max(errors)


@pytest.mark.parametrize(("noise", "outlier_share", "most"), [(0.0, 0.0, 0.01), (0.03, 0.0, 0.1), (0.03, 0.02, 0.12)])
def test_a_steps_time_is_learned_from_its_composition(noise: float, outlier_share: float, most: float) -> None:
    """One mean would be wrong by a factor of three here."""
    assert worst_error(trained(noise, outlier_share)) < most


def test_a_slower_device_is_followed_for_all_compositions() -> None:
    rng, predictor = random.Random(2), trained(0.0, 0.0)
    for _ in range(WINDOW):
        shape = some_shape(rng)
        predictor.add(shape.features, 1.7 * step_seconds(shape))
    assert worst_error(predictor, slower=1.7) < 0.05


@pytest.mark.parametrize("place", [0, 1, 2, 3, 100])
def test_a_time_far_too_short_does_not_bend_what_is_learned(place: int) -> None:
    """Errors are relative, so it would outweigh all others."""
    rng, predictor = random.Random(0), Predictor(2)
    for number in range(101):
        tokens = rng.uniform(10, 1000)
        predictor.add((1.0, tokens), 1e-5 if number == place else 5e-3 + 1e-4 * tokens)
    for tokens in (10.0, 100.0, 1000.0):
        found = predictor.predict((1.0, tokens))
        assert found is not None
        assert found.expected == pytest.approx(5e-3 + 1e-4 * tokens, rel=0.05)


def test_the_mean_counts_slow_samples_that_what_is_expected_leaves_out() -> None:
    """One of ten takes twice as long."""
    predictor = Predictor(2)
    for _ in range(50):
        for sample in [0.01] * 9 + [0.02]:
            predictor.add(ONE, sample)
    found = predictor.predict(ONE)
    assert found is not None
    assert found.expected == pytest.approx(0.01, rel=0.01)
    assert found.mean == pytest.approx(0.011, rel=0.01)


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e7), st.floats(1e-5, 10)), min_size=1, max_size=50))
def test_no_coefficient_is_below_zero(samples: list[tuple[float, float, float]]) -> None:
    regression = Regression(3)
    for a, b, y in samples:
        regression.add((1.0, a, b), y)
    assert min(regression.coefficients) >= 0
    assert max(regression.value((1.0, a, b)) for a, b, _ in samples) < float("inf")


@pytest.mark.parametrize(("attainment", "share"), [(0.5, LEAST_QUANTILE), (0.99, 0.92), (0.995, 0.96)])
def test_single_errors_exceed_the_factor_as_often_as_later_tokens_take_back(attainment: float, share: float) -> None:
    rng, risk, kept = random.Random(0), Risk(attainment), 0
    for number in range(6000):
        error = rng.lognormvariate(0.0, 0.2)
        kept += number >= 2000 and error <= risk.factor
        risk.add(error)
    assert kept / 4000 == pytest.approx(share, abs=0.01)


def test_errors_of_another_time_are_forgotten() -> None:
    risk = Risk(0.9)
    for error in [2.0] * 1024 + [1.1] * 1024:
        risk.add(error)
    assert risk.factor == 1.1


def test_few_errors_do_not_make_the_margin_narrow_and_a_single_one_does_not_make_it_wide() -> None:
    risk = Risk(0.995)
    for error in [1.0] * 10 + [2.9] + [OUTLIER + 0.1] * 3:
        risk.add(error)
    assert risk.factor == FIRST_GUESS
    for error in [1.0] * 900:
        risk.add(error)
    assert risk.factor == 1.0


@pytest.mark.parametrize(("errors", "mean"), [([0.5] * 9, 1.0), ([0.5, 3.5], 1.75), ([], 1.0)])
def test_the_mean_error_makes_no_prediction_shorter(errors: list[float], mean: float) -> None:
    """Work that was faster than predicted is soon expected to be: the margin for decodes to come stays. Outliers count
    as `OUTLIER`."""
    risk = Risk(0.995)
    for error in errors:
        risk.add(error)
    assert risk.mean == mean


def test_steps_that_are_often_far_too_slow_are_no_outliers() -> None:
    risk = Risk(0.995)
    for error in [1.0, 1.0, 1.0, 1.0, 2 * OUTLIER] * 200:
        risk.add(error)
    assert risk.factor == OUTLIER


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
