"""Estimates distinguish outliers from lasting changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coserve.queues.costs import WINDOW, Estimate, Estimates

seconds = st.floats(1e-4, 1.0)
outliers = st.floats(0.0, 1e9)


def predicted(samples: list[float]) -> float | None:
    estimate = Estimate()
    for sample in samples:
        estimate.add(sample)
    return estimate.seconds


@given(st.lists(seconds, min_size=1, max_size=20), outliers, st.data())
def test_one_outlier_of_any_size_anywhere_never_shows(
    samples: list[float], outlier: float, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(samples)))
    found = predicted([*samples[:place], outlier, *samples[place:]])
    assert found is not None
    assert found <= max(samples)


@given(st.lists(outliers, max_size=20), seconds)
def test_a_lasting_change_is_followed_within_three_samples(before: list[float], after: float) -> None:
    assert predicted([*before, after, after, after]) == after


@given(st.lists(outliers, max_size=20), seconds)
def test_a_fall_is_followed_within_two(before: list[float], after: float) -> None:
    found = predicted([*before, after, after])
    assert found is not None
    assert found <= after


@given(st.lists(outliers, min_size=2, max_size=20))
def test_a_prediction_is_a_sample_of_the_window(samples: list[float]) -> None:
    assert predicted(samples) in samples[-WINDOW:]


@given(outliers)
def test_a_single_sample_predicts_nothing(sample: float) -> None:
    assert predicted([sample]) is None


def test_kinds_are_learned_apart_and_stand_in_for_each_other() -> None:
    costs = Estimates()
    assert costs.predict("decode", "prefill") == 0.0
    for _ in range(2):
        costs.add("prefill", 0.5)
    assert costs.predict("decode") == 0.0
    assert costs.predict("decode", "prefill") == 0.5
    for _ in range(2):
        costs.add("decode", 0.1)
    assert costs.predict("decode", "prefill") == 0.1
    costs.keep(lambda kind: kind == "prefill")
    assert (costs.predict("decode"), costs.predict("prefill")) == (0.0, 0.5)
