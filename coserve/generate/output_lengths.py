"""How long answers become, and whether the pages that they will need are there: what tells how many sequences may run
at once. Pure.

As in "Past-Future Scheduler for LLM Serving under SLA Guarantees" (Gong et al., ASPLOS '25): answers are expected to be
as long as past ones were, and a sequence is admitted if at no time the pages of all that run are expected to exceed the
pool.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence
from heapq import merge
from typing import NamedTuple

import numpy as np

from coserve.queues.request import Request

REMEMBERED = 256
"""Answers, the latest, from which lengths are expected."""
UNKNOWN = 512
"""Tokens that an answer is expected to have, if it may have as many, where none is known that was as long."""
MARGIN = 0.5
"""Standard deviations of the tokens that running sequences may need beyond what is expected, kept free for them: with
fewer, many give way; with more, fewer run (`benchmarks/scheduling/admission.py`)."""
GOLDEN_RATIO = 0.6180339887498949


class OutputLengths:
    """The lengths of the answers that ended last and of those under way, as a Kaplan-Meier estimate: an answer that was
    cut at its `max_tokens`, or is under way, tells only that it is longer."""

    def __init__(self) -> None:
        self._latest: deque[tuple[int, bool]] = deque()
        self._sum = 0
        self._ordered: list[tuple[int, bool]] = []
        """The same, by length; of one length those that were cut come last."""
        self._under_way: list[tuple[int, bool]] = []
        self._lengths: list[int] | None = None
        """Lengths at which answers ended by themselves, increasing. None: to be made anew."""
        self._longer: list[float] = []
        """For each the share of answers that are longer, negative: so it increases."""

    @property
    def mean(self) -> float:
        """Mean tokens of the answers that ended last; 0: none has."""
        return self._sum / len(self._latest) if self._latest else 0.0

    def ended(self, tokens: int, *, cut: bool) -> None:
        """An answer of `tokens` tokens ended; `cut`: at its `max_tokens`. One that a client cancelled gave its pages
        back all the same, so it ended by itself."""
        if len(self._latest) == REMEMBERED:
            oldest = self._latest.popleft()
            del self._ordered[bisect_left(self._ordered, oldest)]
            self._sum -= oldest[0]
        self._sum += tokens
        self._latest.append((tokens, cut))
        insort(self._ordered, (tokens, cut))
        self._lengths = None

    def under_way(self, generated: Sequence[int]) -> None:
        """The answers under way have so many tokens by now. Without them the first to end, which are short, would speak
        for all."""
        self._under_way = [(tokens, True) for tokens in sorted(generated)]
        self._lengths = None

    def expected(self, number: int, generated: int, max_tokens: int, *, stops: bool) -> int:
        """Tokens that an answer will have, more than `generated` and at most `max_tokens`; `stops`: a token may end it
        before.

        A length of the past, drawn by the sequence's `number`: those of successive numbers are spread evenly over all.
        """
        if not stops:
            return max_tokens
        lengths, longer = self._curve()
        reached = bisect_right(lengths, generated)
        share = -longer[reached - 1] if reached else 1.0
        drawn = bisect_left(longer, -share * (1 - number * GOLDEN_RATIO % 1), lo=reached)
        if drawn < len(lengths):
            return min(max_tokens, lengths[drawn])
        longest = self._ordered[-1][0] if self._ordered else 0
        return min(max_tokens, max(UNKNOWN, 2 * generated, 2 * longest))

    def growth(self, request: Request) -> int:
        """Tokens that a request is expected to compute beyond those that it has pages for. Its last one is not
        computed."""
        prompt = len(request.message.prompt)
        reached = max(request.length - prompt, request.sampling.min_tokens - 1)
        output = self.expected(request.number, reached, request.max_tokens, stops=bool(request.stop_ids))
        return max(0, prompt + output - 1 - request.length)

    def fit(self, active: Sequence[Request], new: Request, own: int, free: int, page_tokens: int) -> bool:
        """`free` pages, beside `own` ones that a new request takes now, are expected to be enough for it and the active
        ones."""
        self.under_way([each.generated for each in active])
        growing = [
            Growing(each.length, self.growth(each), len(each.pages) - each.shared, bool(each.stop_ids))
            for each in active
        ]
        growing.append(Growing(new.length, self.growth(new), own, bool(new.stop_ids)))
        return fits(growing, free, page_tokens)

    def _curve(self) -> tuple[list[int], list[float]]:
        if self._lengths is None:
            self._lengths, self._longer = [], []
            answers = [*merge(self._ordered, self._under_way)]
            share = 1.0
            for shorter, (tokens, cut) in enumerate(answers):
                if cut:
                    continue
                share *= 1 - 1 / (len(answers) - shorter)
                if self._lengths and self._lengths[-1] == tokens:
                    self._longer[-1] = -share
                else:
                    self._lengths.append(tokens)
                    self._longer.append(-share)
        return self._lengths, self._longer


class Growing(NamedTuple):
    """A sequence, and what it is expected to need."""

    length: int
    """Tokens that it has pages for."""
    growth: int
    """Further ones, of which it computes one a step."""
    own_pages: int
    """Those that it gives back when it ends."""
    estimated: bool
    """Its growth may be another."""


def fits(sequences: Sequence[Growing], free_pages: int, page_tokens: int) -> bool:
    """`free_pages` are expected to be enough for the sequences until all have ended."""
    free_tokens = free_pages * page_tokens
    if sum(each.growth + page_tokens for each in sequences) <= free_tokens:
        return True
    # As of lengths that are distributed exponentially, the deviation of each is its mean.
    deviation = math.sqrt(sum(each.growth**2 for each in sequences if each.estimated))
    return peak_pages(sequences, page_tokens) <= (free_tokens - MARGIN * deviation) / page_tokens


def peak_pages(sequences: Sequence[Growing], page_tokens: int) -> int:
    """Most pages that the sequences take beyond those that they have now, at any time until all have ended."""
    length, growth, own = (np.array(column) for column in list(zip(*sequences, strict=True))[:3])
    times = np.unique(growth)[:, None]  # pages are given back only then, so before that there are most
    needs = -(-(length + times) // page_tokens) + length // -page_tokens
    return int(np.where(growth >= times, needs, -own).sum(axis=1).max())
