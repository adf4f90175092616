"""Cost of requests that come, are admitted or leave while many wait: the queue's bookkeeping, apart from the policy's
decision.

    python -m benchmarks.scheduling.queue_costs --out benchmarks/results

Each row is the median of the repeats in microseconds: of an arrival (its place in the queue, and whether it would be
late) with requests of one class and of both, of an admission (a plan of its step, and its pages) with 32 adapters
waiting and with one for each request, and of a client that leaves while all others leave, too. Needs no GPU.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence

from benchmarks.common.options import make_parser
from benchmarks.common.provenance import cpu_name
from benchmarks.common.results import Results
from coserve.core.link.generation import Generate, RequestFailed
from coserve.core.sampling import SamplingParams
from coserve.core.training.micro_step import MicroStep
from coserve.core.types import AdapterRef, Slo
from coserve.engine.reception import Reception
from coserve.engine.views import Views
from coserve.generate.schedule import Scheduler
from coserve.queues.request import State
from tests.support.pages import BareAdapters, BarePages

WAITING, ADAPTERS, REPEATS, ROUNDS = (1000, 4096), 32, 500, 5
BATCH_SHARE = 0.3
"""Of requests, where both classes wait."""
FAR = 1e6
"""Seconds until the first token is due, so that nobody is late."""


class NoJobs:
    """Nothing trains."""

    def ready(self) -> tuple[str, ...]:
        return ()

    def next_micro_step(self, job: str) -> MicroStep:
        raise NotImplementedError

    def micro_batch_tokens(self, job: str) -> int:
        raise NotImplementedError

    def in_training(self, job: str) -> bool:
        raise NotImplementedError


class Case:
    """A full batch before `waiting` requests; every 10 ms one is admitted and another one comes."""

    def __init__(self, waiting: int, adapters: int, batch_share: float = 0.0) -> None:
        self._rng, self._now, self._made = random.Random(0), 0.0, 0
        self._adapters, self._batch_share = adapters, batch_share
        self._scheduler = Scheduler(
            BarePages(waiting, 4096), BareAdapters(), max_running=1, step_tokens=2048, max_queue=2 * waiting
        )
        self._reception = Reception(self._scheduler, Views(NoJobs()), self._refused)
        for _ in range(waiting):
            self._reception.enqueue(self._request(), self._now)

    def _request(self) -> Generate:
        number, self._made, self._now = self._made, self._made + 1, self._now + 0.01
        return Generate(
            id=f"r{number}",
            prompt=(1,) * 256,
            sampling=SamplingParams(max_tokens=64 + self._rng.randrange(200)),
            adapter=AdapterRef(f"a{number % self._adapters}", 1),
            slo=Slo(ttft=FAR, tpot=0.2, batch=self._rng.random() < self._batch_share, shed=True),
        )

    def _refused(self, messages: Sequence[RequestFailed]) -> None:
        raise AssertionError(messages)

    def repeat(self) -> tuple[float, float]:
        """Microseconds of an admission, and of an arrival."""
        for running in [each for each in self._scheduler.requests.values() if each.state is State.ACTIVE]:
            self._scheduler.remove(running)

        def admit() -> None:
            self._scheduler.commit(self._scheduler.propose(), 1, now=0.0)
            self._reception.admitted(1, self._now)

        request = self._request()
        return _microseconds(admit), _microseconds(lambda: self._reception.enqueue(request, self._now))

    def leave(self) -> float:
        """Microseconds for each of all clients, who leave at once."""
        ids = [entry.id for entry in self._scheduler.queue.waiting(len(self._scheduler.queue))]
        self._rng.shuffle(ids)
        return _microseconds(lambda: self._scheduler.cancel_queued(ids)) / len(ids)


def _microseconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return 1e6 * (time.perf_counter() - began)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--label", default="", help="part of the keys, to compare two commits")
    options = parser.parse_args()
    settings = {"waiting": WAITING, "adapters": ADAPTERS, "batch_share": BATCH_SHARE}
    results = Results.of(
        options,
        "queue_costs.json",
        script="benchmarks.scheduling.queue_costs",
        hardware=cpu_name(),
        seed=0,
        settings=settings,
    )
    label = f".{options.label}" if options.label else ""

    def put(what: str, values: list[float]) -> None:
        results.put(f"queue_costs_us.{what}{label}", round(statistics.median(values), 1), "us", values=values)

    for waiting in WAITING:
        for name, adapters, share in (
            ("one_class", ADAPTERS, 0.0),
            ("both_classes", ADAPTERS, BATCH_SHARE),
            ("own_adapters", waiting, 0.0),
        ):
            case = Case(waiting, adapters, share)
            admissions, arrivals = zip(*(case.repeat() for _ in range(REPEATS)), strict=True)
            put(f"admission.{name}.w{waiting}", list(admissions))
            put(f"arrival.{name}.w{waiting}", list(arrivals))
        put(f"leave.w{waiting}", [Case(waiting, ADAPTERS).leave() for _ in range(ROUNDS)])


if __name__ == "__main__":
    main()
