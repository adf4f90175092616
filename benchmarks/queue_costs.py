"""Cost of requests that come, are admitted or leave while many wait: the queue's bookkeeping, apart from the policy's decision.

    python -m benchmarks.queue_costs --out benchmarks/results

Each row is the median of the repeats in microseconds: of an arrival (its place in the queue, and whether it would be late) with requests of one class and
of both, of an admission with 32 adapters waiting and with one for each request, and of a client that leaves while all others leave, too. Needs no GPU.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

from benchmarks.demo import hardware
from benchmarks.options import make_parser
from benchmarks.serving_results import Results
from coserve.link import Generate
from coserve.queues.inference import InferenceQueue
from coserve.queues.shedding import Shedding
from coserve.types import AdapterRef, SamplingParams, Slo

WAITING, ADAPTERS, REPEATS, ROUNDS = (1000, 4096), 32, 500, 5
BATCH_SHARE = 0.3
"""Of requests, where both classes wait."""
FAR = 1e6
"""Seconds until the first token is due, so that nobody is late."""


class Case:
    """A full batch before `waiting` requests; every 10 ms one is admitted and another one comes."""

    def __init__(self, waiting: int, adapters: int, batch_share: float = 0.0) -> None:
        self._rng, self._now, self._made = random.Random(0), 0.0, 0
        self._adapters, self._batch_share = adapters, batch_share
        self._queue = InferenceQueue(2 * waiting, fair=True)
        self._shedding = Shedding(self._queue, lambda _: False)
        for _ in range(waiting):
            self._queue.push(self._request(), arrived=self._now, deadline=self._now + 2.0)

    def _request(self) -> Generate:
        number, self._made, self._now = self._made, self._made + 1, self._now + 0.01
        return Generate(
            id=f"r{number}",
            prompt=(1,) * 256,
            sampling=SamplingParams(max_tokens=64 + self._rng.randrange(200)),
            adapter=AdapterRef(f"a{number % self._adapters}", 1),
            slo=Slo(ttft=2.0, tpot=0.2, batch=self._rng.random() < self._batch_share),
        )

    def repeat(self) -> tuple[float, float]:
        """Microseconds of an admission, and of an arrival."""
        admission = _microseconds(
            lambda: self._shedding.admitted(self._queue.pop(1), self._now, full=True),
        )
        request = self._request()

        def arrive() -> None:
            self._queue.push(request, arrived=self._now, deadline=self._now + 2.0)
            self._shedding.arrived(request, self._now + FAR, 0, 0.01, 0.05, self._now, full=True)

        return admission, _microseconds(arrive)

    def leave(self) -> float:
        """Microseconds for each of all clients, who leave at once."""
        ids = [entry.message.id for entry in self._queue.waiting(len(self._queue))]
        self._rng.shuffle(ids)
        return _microseconds(lambda: self._queue.cancel(ids)) / len(ids)


def _microseconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return 1e6 * (time.perf_counter() - began)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--label", default="", help="part of the keys, to compare two commits")
    options = parser.parse_args()
    settings = {"waiting": WAITING, "adapters": ADAPTERS, "batch_share": BATCH_SHARE}
    results = Results(
        options.out, "queue_costs.json", script="benchmarks.queue_costs", hardware=hardware(), seed=0,
        revision=options.commit, settings=settings,
    )  # fmt: skip
    label = f".{options.label}" if options.label else ""

    def put(what: str, values: list[float]) -> None:
        results.put(f"queue_costs_us.{what}{label}", round(statistics.median(values), 1), "us", values=values)

    for waiting in WAITING:
        for name, adapters, share in (
            ("one_class", ADAPTERS, 0.0), ("both_classes", ADAPTERS, BATCH_SHARE), ("own_adapters", waiting, 0.0)
        ):  # fmt: skip
            case = Case(waiting, adapters, share)
            admissions, arrivals = zip(*(case.repeat() for _ in range(REPEATS)), strict=True)
            put(f"admission.{name}.w{waiting}", list(admissions))
            put(f"arrival.{name}.w{waiting}", list(arrivals))
        put(f"leave.w{waiting}", [Case(waiting, ADAPTERS).leave() for _ in range(ROUNDS)])


if __name__ == "__main__":
    main()
