"""Readings of Temporal Sharing, TS(n), on the load of the ETS paper's table 5.1, against its table 5.2.

    python -m benchmarks.ets.ts_readings --out benchmarks/results

A model of the schedulers in virtual time; no GPU. Three constants are fitted to the table's ETS row: the seconds of an
inference batch of m requests, `fixed + per_request * m`, and fine-tuning's tokens a second. `fixed` is a given share of
a batch of 53 requests, the usual size under ETS. Then each reading of TS(n) runs with them:

- unit: a fine-tuning turn is a whole request (512 rows) or one batch of it (32 rows).
- inference: a turn counts batches, taken from the queue ("batch") or complete once 5 s have passed since their first
  request arrived ("complete"), or single requests ("request").
- idle: a side with nothing to dispatch gives its turn away ("given") or keeps it ("kept").
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from statistics import mean
from typing import Literal, get_args

from benchmarks.common.options import make_parser
from benchmarks.common.results import Results

GAP, JOB_GAP, ROWS = 0.1, 20.0, 512
"""Table 5.1: seconds between requests and between fine-tuning requests, and rows of one of the latter."""
SIZE, DELAY, BATCH_ROWS = 64, 5.0, 32
"""Section 5.2.2."""
ROW_TOKENS = 481.36
"""TS(5)'s 12,324 tokens/s are taken as the offered load of 25.6 rows/s."""
LATENCY, TOKENS_PER_S = 6.18, 9071.0
"""Table 5.2, ETS."""
JITTER = 0.1
"""Largest deviation of a batch's seconds, as a share."""
SHARES = (0.0, 0.3, 0.6)
FIT_SECONDS, SECONDS = 400.0, 1600.0
"""Of arrivals."""
NS = (5, 10, 20)


@dataclass(frozen=True)
class Costs:
    fixed: float
    per_request: float
    tokens_per_s: float


Unit = Literal["request", "batch"]
Inference = Literal["complete", "batch", "request"]
Idle = Literal["given", "kept"]


@dataclass(frozen=True)
class Reading:
    unit: Unit
    inference: Inference
    idle: Idle


UNITS: tuple[Unit, ...] = get_args(Unit)
INFERENCES: tuple[Inference, ...] = get_args(Inference)
IDLES: tuple[Idle, ...] = get_args(Idle)
READINGS = tuple(Reading(*each) for each in product(UNITS, INFERENCES, IDLES))
CHOSEN = READINGS[0]


@dataclass(frozen=True)
class Row:
    """Of table 5.2: seconds, shares, and tokens a second while requests arrive."""

    latency: float
    in_10_s: float
    in_60_s: float
    tokens_per_s: float


class Model:
    """One scheduler. `n` of None: ETS."""

    def __init__(self, costs: Costs, reading: Reading, n: int | None, seconds: float) -> None:
        self._costs, self._reading, self._n, self._seconds = costs, reading, n, seconds
        self._rng = random.Random(0)
        self._now = 0.0
        self._arrivals = deque(i * GAP for i in range(round(seconds / GAP)))
        self._jobs_due = deque(i * JOB_GAP for i in range(round(seconds / JOB_GAP)))
        self._queue, self._jobs = deque[float](), deque[int]()
        """Arrivals of waiting requests, and the batches left of waiting jobs."""
        self._served = 0
        """Of inference in this turn."""
        self._in_turn = False
        self._latencies, self._batches = list[float](), 0

    def run(self) -> Row:
        while self._arrivals or self._queue:
            self._receive()
            if not self._act():
                self._sleep()
        found = self._latencies
        return Row(
            mean(found),
            sum(each <= 10 for each in found) / len(found),
            sum(each <= 60 for each in found) / len(found),
            self._batches * BATCH_ROWS * ROW_TOKENS / self._seconds,
        )

    def _receive(self) -> None:
        while self._arrivals and self._arrivals[0] <= self._now:
            self._queue.append(self._arrivals.popleft())
        while self._jobs_due and self._jobs_due[0] <= self._now:
            self._jobs_due.popleft()
            self._jobs.append(ROWS // BATCH_ROWS)

    def _act(self) -> bool:
        """Run one batch. False: nothing may run now."""
        ready = self._ready()
        if self._n is None:
            infers = ready > 0
        else:
            over = self._served >= self._n
            given = self._reading.idle == "given"
            trains = self._in_turn or over or (given and not ready)
            infers = ready > 0 and not (self._in_turn or (over and (self._jobs or not given)))
            if not infers and not trains:
                return False
        if infers:
            self._infer(ready)
        elif self._jobs:
            self._train()
        else:
            return False
        return True

    def _ready(self) -> int:
        """Size of the batch that can be dispatched; 0 without one."""
        queue, size = self._queue, SIZE
        if not queue:
            return 0
        if self._n is not None and self._reading.inference == "request":
            size = max(1, min(SIZE, self._n - self._served))
        waits = len(queue)
        if self._n is not None and self._reading.inference == "complete":
            waits = sum(arrived <= queue[0] + DELAY for arrived, _ in zip(queue, range(size), strict=False))
        return min(size, waits) if waits >= size or self._now - queue[0] > DELAY else 0

    def _infer(self, size: int) -> None:
        self._spend(self._costs.fixed + self._costs.per_request * size)
        self._latencies += [self._now - self._queue.popleft() for _ in range(size)]
        self._served += size if self._reading.inference == "request" else 1

    def _train(self) -> None:
        self._spend(BATCH_ROWS * ROW_TOKENS / self._costs.tokens_per_s)
        self._batches += self._now <= self._seconds
        self._jobs[0] -= 1
        self._in_turn = self._reading.unit == "request" and self._jobs[0] > 0
        if not self._jobs[0]:
            self._jobs.popleft()
        if not self._in_turn:
            self._served = 0

    def _spend(self, seconds: float) -> None:
        self._now += seconds * self._rng.uniform(1 - JITTER, 1 + JITTER)

    def _sleep(self) -> None:
        events = [*list(self._arrivals)[:1], *list(self._jobs_due)[:1]]
        if self._queue and self._queue[0] + DELAY >= self._now:
            events.append(self._queue[0] + DELAY + 1e-6)
        if not events:  # a side keeps its turn for ever
            self._queue.clear()
            return
        self._now = max(self._now, min(events))


def fit(share: float) -> Costs:
    """Constants that give the table's ETS row."""

    def error(costs: Costs) -> float:
        row = Model(costs, CHOSEN, None, FIT_SECONDS).run()
        return abs(row.latency / LATENCY - 1) + abs(row.tokens_per_s / TOKENS_PER_S - 1) + (1 - row.in_10_s)

    return min(_candidates(share), key=error)


def _candidates(share: float) -> Iterator[Costs]:
    for batch, tokens in product(range(30, 40), range(22, 30)):
        yield Costs(share * batch / 10, (1 - share) * batch / 10 / 53, 1000.0 * tokens)


def shows_the_trends(ets: Row, few: Row, middle: Row, many: Row) -> bool:
    """TS(5): the longest latency, hardly a request within 10 s, the most fine-tuning. TS(10) and TS(20): alike, slower
    than ETS, some requests within 10 s. ETS: all within 10 s."""
    return (
        few.latency > 1.3 * middle.latency
        and all(row.latency > 1.3 * ets.latency and 0.1 < row.in_10_s < 0.9 for row in (middle, many))
        and abs(middle.latency / many.latency - 1) < 0.1
        and few.in_10_s < 0.1
        and ets.in_10_s > 0.99
        and few.tokens_per_s > max(ets.tokens_per_s, middle.tokens_per_s, many.tokens_per_s)
    )


def main() -> None:
    parser = make_parser(__doc__)
    options = parser.parse_args()
    settings = {"jitter": JITTER, "row_tokens": ROW_TOKENS, "readings": [asdict(each) for each in READINGS]}
    results = Results.of(
        options,
        "ts_readings.json",
        script="benchmarks.ets.ts_readings",
        hardware="any: virtual time",
        seed=0,
        settings=settings,
    )
    for share in SHARES:
        costs = fit(share)
        ets, name = Model(costs, CHOSEN, None, SECONDS).run(), f"ts.fixed{round(100 * share)}"
        results.put(
            f"{name}.ets", round(ets.latency, 2), "s mean latency", about=asdict(ets) | {"costs": asdict(costs)}
        )
        for reading in READINGS:
            rows = {n: Model(costs, reading, n, SECONDS).run() for n in NS}
            about: dict[str, object] = {f"n{n}": asdict(row) for n, row in rows.items()}
            about["trends"] = shows_the_trends(ets, *rows.values())
            key = f"{name}.{reading.unit}.{reading.inference}.{reading.idle}"
            results.put(key, round(rows[NS[0]].latency, 2), "s mean latency, TS(5)", about=about)


if __name__ == "__main__":
    main()
