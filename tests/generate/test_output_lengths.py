"""What is expected of answers' lengths, and of the pages that they will need."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from coserve.generate.output_lengths import REMEMBERED, UNKNOWN, Growing, OutputLengths, fits, peak_pages
from tests.support.examples import examples


def mean(lengths: OutputLengths, generated: int, max_tokens: int) -> float:
    drawn = [lengths.expected(number, generated, max_tokens, stops=True) for number in range(400)]
    assert all(generated < each <= max_tokens for each in drawn)
    return sum(drawn) / len(drawn)


def test_before_any_has_ended() -> None:
    lengths = OutputLengths()
    assert lengths.expected(0, 0, 10_000, stops=True) == UNKNOWN
    assert lengths.expected(0, 0, 100, stops=True) == 100
    assert lengths.expected(0, 400, 10_000, stops=True) == 800
    assert lengths.expected(0, 0, 10_000, stops=False) == 10_000


def test_as_long_as_the_latest_were_and_longer_than_it_is_already() -> None:
    lengths, chance = OutputLengths(), random.Random(0)
    for _ in range(REMEMBERED):
        lengths.ended(9000, cut=False)
    past = [chance.randint(1, 200) for _ in range(REMEMBERED)]
    for each in past:
        lengths.ended(each, cut=False)
    for generated in (0, 50, 150):
        longer = [each for each in past if each > generated]
        assert abs(mean(lengths, generated, 10_000) / (sum(longer) / len(longer)) - 1) < 0.05
    assert mean(lengths, 0, 60) < 60


def test_an_answer_that_was_cut_would_have_become_longer() -> None:
    """Half of the answers have 40 tokens, half 200; half of all were cut at 100."""
    lengths = OutputLengths()
    for number in range(REMEMBERED):
        long, cut = number % 2, number % 4 > 1
        lengths.ended(min(200 if long else 40, 100 if cut else 200), cut=bool(cut and long))
    assert abs(mean(lengths, 0, 1000) - 120) < 4


def test_the_first_to_end_are_not_taken_for_all() -> None:
    """Of a hundred answers that began together ten have ended after 5 tokens."""
    lengths = OutputLengths()
    for _ in range(10):
        lengths.ended(5, cut=False)
    assert mean(lengths, 0, 300) == 5
    lengths.under_way([5] * 90)
    assert abs(mean(lengths, 0, 300) - (0.1 * 5 + 0.9 * 300)) < 5


SEQUENCES = st.lists(
    st.builds(Growing, st.integers(1, 40), st.integers(0, 30), st.integers(0, 9), st.booleans()), min_size=1, max_size=8
)


@settings(max_examples=examples(200), deadline=None)
@given(sequences=SEQUENCES, page_tokens=st.integers(1, 9), free=st.integers(0, 40))
def test_the_peak_is_that_of_one_step_after_the_other(sequences: list[Growing], page_tokens: int, free: int) -> None:
    def pages(tokens: int) -> int:
        return -(-tokens // page_tokens)

    peak = 0
    for step in range(31):
        taken = sum(
            pages(each.length + step) - pages(each.length) if step <= each.growth else -each.own_pages
            for each in sequences
        )
        peak = max(peak, taken) if any(step <= each.growth for each in sequences) else peak
    found = peak_pages(sequences, page_tokens)
    assert max(0, found) == peak
    known = [each._replace(estimated=False) for each in sequences]
    assert fits(known, free, page_tokens) == (found <= free)
    assert fits(known, free, page_tokens) or not fits(sequences, free, page_tokens)
