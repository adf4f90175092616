"""Predicted lengths of answers, and whether the KV cache will hold them: decides how many sequences may run at once.
Pure.

After "Past-Future Scheduler for LLM Serving under SLA Guarantees" (Gong et al., ASPLOS '25): answers are expected to be
as long as past ones, and a sequence is admitted if the pages of all running sequences are never expected to exceed the
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
"""Latest answers that lengths are predicted from."""
UNKNOWN = 512
"""Predicted tokens of an answer when no past answer was that long; capped by its `max_tokens`."""
MARGIN = 0.5
"""Safety margin of admission, in standard deviations of the predicted tokens. Less: more preemptions. More: fewer
sequences run (docs/LOG.md)."""
GOLDEN_RATIO = 0.6180339887498949


class OutputLengths:
    """Distribution of answer lengths, a Kaplan-Meier estimate over the latest answers and those under way: an answer
    cut at its `max_tokens`, or under way, is censored."""

    def __init__(self) -> None:
        self._latest: deque[tuple[int, bool]] = deque()
        self._sum = 0
        self._ordered: list[tuple[int, bool]] = []
        """`_latest`, sorted by length; among equal lengths, cut answers last."""
        self._under_way: list[tuple[int, bool]] = []
        self._lengths: list[int] | None = None
        """Distinct lengths of uncensored answers, increasing. None: to be recomputed."""
        self._longer: list[float] = []
        """For each of these lengths the fraction of answers that are longer, negated so that it increases."""

    @property
    def mean(self) -> float:
        """Mean tokens of the answers that ended last; 0: none has."""
        return self._sum / len(self._latest) if self._latest else 0.0

    def ended(self, tokens: int, *, cut: bool) -> None:
        """Add an answer of `tokens` tokens; `cut`: it reached `max_tokens`. A cancelled answer counts as uncut: it
        freed its pages too."""
        if len(self._latest) == REMEMBERED:
            oldest = self._latest.popleft()
            del self._ordered[bisect_left(self._ordered, oldest)]
            self._sum -= oldest[0]
        self._sum += tokens
        self._latest.append((tokens, cut))
        insort(self._ordered, (tokens, cut))
        self._lengths = None

    def under_way(self, generated: Sequence[int]) -> None:
        """Set the current lengths of the answers under way. Without them, the first answers to end, which are short,
        would bias the estimate."""
        self._under_way = [(tokens, True) for tokens in sorted(generated)]
        self._lengths = None

    def expected(self, number: int, generated: int, max_tokens: int, *, stops: bool) -> int:
        """Predicted total tokens of an answer, more than `generated` and at most `max_tokens`; `stops`: a stop token
        may end it earlier.

        It is a past length, drawn by `number`; successive numbers are spread evenly over the distribution.
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
        """Tokens that a request is predicted to compute beyond `Request.length`. The last sampled token is not
        computed."""
        prompt, length = request.prompt_tokens, request.length
        reached = max(length - prompt, request.sampling.min_tokens - 1)
        output = self.expected(request.number, reached, request.max_tokens, stops=bool(request.stop_ids))
        return max(0, prompt + output - 1 - length)

    def growing(self, request: Request, own_pages: int) -> Growing:
        """Return a request that has, or would take, `own_pages` pages, and what it is predicted to need."""
        return Growing(request.length, self.growth(request), own_pages, bool(request.stop_ids))

    def all_growing(self, active: Sequence[Request]) -> list[Growing]:
        """Return the active requests, and what each is predicted to need."""
        self.under_way([each.generated for each in active])
        return [self.growing(each, len(each.pages) - each.shared) for each in active]

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
    """A sequence and its predicted need."""

    length: int
    """Tokens that it has pages for."""
    growth: int
    """Predicted further tokens, one per step."""
    own_pages: int
    """Pages that it frees when it ends."""
    estimated: bool
    """Whether `growth` is uncertain."""


def fits(sequences: Sequence[Growing], free_pages: int, page_tokens: int) -> bool:
    """Whether `free_pages` are expected to suffice for the sequences until all have ended."""
    free_tokens = free_pages * page_tokens
    if sum(each.growth + page_tokens for each in sequences) <= free_tokens:
        return True
    # For exponentially distributed lengths, the standard deviation equals the mean.
    deviation = math.sqrt(sum(each.growth**2 for each in sequences if each.estimated))
    return peak_pages(sequences, page_tokens) <= (free_tokens - MARGIN * deviation) / page_tokens


def peak_pages(sequences: Sequence[Growing], page_tokens: int) -> int:
    """Largest number of additional pages that the sequences hold together, at any time until all have ended."""
    length, growth, own = (np.array(column) for column in list(zip(*sequences, strict=True))[:3])
    times = np.unique(growth)[:, None]  # the need peaks just before a sequence ends
    needs = -(-(length + times) // page_tokens) + length // -page_tokens
    return int(np.where(growth >= times, needs, -own).sum(axis=1).max())
