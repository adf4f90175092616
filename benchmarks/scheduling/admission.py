"""Admission by expected lengths, simulated: preemptions, the longest wait between two tokens, and the steps that a load
takes.

1500 requests arrive at once, with prompts of 50 tokens, at a pool of 16,384 tokens and 256 places. Answers end by
themselves.
`pages`: a request is admitted as soon as there are pages for its prompt. `expected`: as the daemon does, by the lengths
of the answers before (`generate/output_lengths.py`). `known`: their lengths are known beforehand. No model runs: a step
is one token of each running sequence, and all prompts that were admitted.

    python -m benchmarks.scheduling.admission --out benchmarks/results
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

from benchmarks.common.options import make_parser
from benchmarks.common.provenance import cpu_name
from benchmarks.common.results import Results
from coserve.core.link.generation import Generate
from coserve.core.sampling import SamplingParams
from coserve.core.types import Slo
from coserve.generate.schedule import Scheduler
from coserve.queues.request import Request
from tests.support.lengths import OneMoreToken
from tests.support.pages import BareAdapters, BarePages

REQUESTS, PROMPT, PAGES, PAGE_TOKENS, PLACES = 1500, 50, 1024, 16, 256
STOP = 1
LOADS: dict[str, tuple[Callable[[random.Random], float], int]] = {
    "exponential50": (lambda chance: chance.expovariate(1 / 50), 1000),
    "lognormal": (lambda chance: chance.lognormvariate(4.6, 0.8), 2000),
    "uniform200": (lambda chance: chance.randint(1, 200), 200),
    "ten_or_300": (lambda chance: chance.choice((10, 300)), 300),
    "always100": (lambda chance: 100, 100),
}
"""How many tokens answers have, and how many they may have."""


class Run:
    """One load under one way of admission."""

    def __init__(self, load: str, how: str, seed: int) -> None:
        draw, most = LOADS[load]
        chance = random.Random(seed)
        self._ends = [max(1, min(most, int(draw(chance)))) for _ in range(REQUESTS)]
        lengths = OneMoreToken() if how == "pages" else None
        self._scheduler = Scheduler(
            BarePages(PAGES, PAGE_TOKENS),
            BareAdapters(),
            max_running=PLACES,
            step_tokens=REQUESTS * PROMPT,
            lengths=lengths,
        )
        for number, end in enumerate(self._ends):
            stops = frozenset[int]() if how == "known" else frozenset([STOP])
            self._scheduler.add(_request(number, end if how == "known" else most, stops))
        self.steps = self.longest_wait = self._computed = 0
        self.plan_us: list[float] = []
        self._seen: dict[int, int] = {}

    def step(self) -> None:
        began = time.perf_counter()
        scheduled = self._scheduler.commit(self._scheduler.propose(), now=0.0)
        self.plan_us.append(1e6 * (time.perf_counter() - began))
        self.steps += 1
        for item in scheduled:
            own = item.request
            own.computed += item.tokens
            self._computed += item.tokens
            if own.pending == 0:
                self.longest_wait = max(self.longest_wait, self.steps - self._seen.get(own.number, self.steps))
                self._seen[own.number] = self.steps
                if own.push(STOP if own.generated + 1 == self._ends[own.number] else 0) is not None:
                    self._scheduler.remove(own)
        self._scheduler.changed()

    def until_all_have_ended(self) -> Run:
        while len(self._scheduler):
            self.step()
        return self

    @property
    def preemptions(self) -> int:
        return self._scheduler.preemptions

    @property
    def computed_again(self) -> float:
        """Share of the tokens that had been computed before."""
        once = sum(PROMPT + end - 1 for end in self._ends)
        return (self._computed - once) / once


def _request(number: int, max_tokens: int, stop_ids: frozenset[int]) -> Request:
    sampling, slo = SamplingParams(max_tokens=max_tokens), Slo(ttft=1, tpot=1)
    message = Generate(id=str(number), prompt=(0,) * PROMPT, sampling=sampling, adapter=None, slo=slo)
    return Request(message, stop_ids=stop_ids)


def main() -> None:
    options = make_parser(__doc__).parse_args()
    settings = {
        "requests": REQUESTS,
        "prompt": PROMPT,
        "pool_tokens": PAGES * PAGE_TOKENS,
        "places": PLACES,
        "seeds": 3,
    }
    results = Results.of(options, "admission.json", __file__, settings, hardware=cpu_name())
    for load in LOADS:
        for how in ("pages", "expected", "known"):
            runs = [Run(load, how, seed).until_all_have_ended() for seed in range(3)]
            for name, unit, values in (
                ("preemptions", "times", [float(run.preemptions) for run in runs]),
                ("longest_wait", "steps", [float(run.longest_wait) for run in runs]),
                ("steps", "steps", [float(run.steps) for run in runs]),
                ("computed_again", "share of tokens", [round(run.computed_again, 4) for run in runs]),
                ("plan_us", "us a plan", [round(statistics.mean(run.plan_us), 1) for run in runs]),
            ):
                results.put(f"admission.{load}.{how}.{name}", statistics.median(values), unit, None, values)


if __name__ == "__main__":
    main()
