"""Cost of one scheduling decision: the next step's plan, the engine's view of it, and the policy's answer, with learned
times of steps and slices.

    python -m benchmarks.scheduling.decisions --out benchmarks/results

1,000 requests of 32 adapters wait, up to 64 run, and 100 jobs can train. Each policy decides when nothing has changed
since its last decision, after a generation step that gave every running request a token, and after a request was
admitted and another one came (their bookkeeping is not counted). Needs no GPU. A row is the median of the repeats in
microseconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from msgspec import structs

from benchmarks.common.options import make_parser
from benchmarks.common.provenance import cpu_name
from benchmarks.common.results import Results, Target
from coserve.config import Config
from coserve.core.link.generation import Generate, Tokens
from coserve.core.sampling import SamplingParams
from coserve.core.training.micro_step import MicroStep
from coserve.core.types import AdapterRef, Slo
from coserve.engine.views import Views
from coserve.generate.schedule import Scheduler
from coserve.queues.finetune import JobQueue
from coserve.queues.policies.choice import make_policy
from coserve.queues.policy import Train
from coserve.queues.request import Request
from coserve.queues.shapes import StepKind, StepShape
from tests.support.pages import BareAdapters, BarePages

WAITING, BATCH, JOBS, ADAPTERS, REPEATS = 1000, 64, 100, 32, 2000
LEARNED = 2000
"""Measured steps of each kind, and slices."""
TARGET = Target(50.0, most=True)


def request(number: int) -> Generate:
    return Generate(
        id=f"r{number}",
        prompt=(1,) * 256,
        sampling=SamplingParams(max_tokens=64),
        adapter=AdapterRef(f"a{number % ADAPTERS}", 1),
        slo=Slo(ttft=2.0, tpot=0.2),
    )


@dataclass
class Jobs:
    """`JOBS` jobs that can train."""

    queue: JobQueue

    def ready(self) -> tuple[str, ...]:
        return self.queue.ready()

    def next_micro_step(self, job: str) -> MicroStep:
        return MicroStep.FORWARD

    def micro_batch_tokens(self, job: str) -> int:
        return 4096

    def in_training(self, job: str) -> bool:
        return job in self.queue


class Case:
    """One policy with `running` requests in the batch."""

    def __init__(self, policy: str, running: int) -> None:
        config = Config(policy=policy)
        jobs, self._scheduler = (
            JobQueue(),
            Scheduler(
                BarePages(BATCH, 4096),
                BareAdapters(),
                max_running=BATCH,
                step_tokens=2048,
                max_queue=2 * WAITING,
                fair=config.fair,
            ),
        )
        for job in range(JOBS):
            jobs.add(f"j{job}")
        self._numbers = count()
        for _ in range(WAITING):
            self._push()
        self._tokens = [Tokens(id=f"x{i}", tokens=(1,), finished=None) for i in range(running)]
        for own in self._tokens:
            self._scheduler.add(Request(structs.replace(request(0), id=own.id)))
        for _ in range(BATCH):  # until all prompts are computed
            for share in self._scheduler.commit(self._scheduler.propose(), 0, now=0.0):
                share.request.computed += share.tokens
            self._scheduler.changed()
        self._views = Views(Jobs(jobs), overlaps=config.trains_concurrently)
        self._policy = make_policy(config)
        self._learn()

    def _learn(self) -> None:
        """Times of steps and slices, as after some minutes."""
        for number in range(LEARNED):
            shape = StepShape(number % 64, 300 * (number % 64), 256 * (number % 3 == 0))
            for overlapped in (False, True):
                self._views.step_took(shape, 0.006 + 1e-4 * (number % 7), overlapped=overlapped)
            steps: list[tuple[float, StepKind | None]] = [(0.0, None), (0.004, "decode"), (0.004, "prefill")]
            for beside, kind in steps:
                self._views.slices.ran(Train("j0", 1), MicroStep.FORWARD, 1, 4096, 0.01 + beside / 4, 0.0, beside, kind)

    def _push(self) -> None:
        self._scheduler.arrive(Request(request(next(self._numbers))))

    def nothing(self) -> None:
        """The queues stay as they are."""

    def step(self) -> None:
        self._scheduler.tokens_came(self._tokens, 0.5)

    def arrival(self) -> None:
        self._scheduler.cancel_queued([self._scheduler.queue.waiting(1)[0].id])
        self._push()

    def seconds(self, change: Callable[[], None]) -> float:
        """Of a decision after `change`."""
        change()
        began = time.perf_counter()
        self._policy.decide(self._views.view(self._scheduler.propose(), 0.5), 0.5)
        return time.perf_counter() - began


def main() -> None:
    options = make_parser(__doc__).parse_args()
    settings = {"waiting": WAITING, "batch": BATCH, "jobs": JOBS, "adapters": ADAPTERS}
    results = Results.of(options, "decisions.json", __file__, settings, hardware=cpu_name())
    for policy in ("slack", "overlap", "ets", "ts", "inference-first", "spatial"):
        for running in (0, BATCH // 2, BATCH):
            case = Case(policy, running)
            for change in (case.nothing, case.step, case.arrival):
                found = sorted(1e6 * case.seconds(change) for _ in range(REPEATS))
                key = f"decision_us.{policy}.running{running}.{change.__name__}"
                about = {"p99": round(found[REPEATS * 99 // 100], 1)}
                results.put(key, round(statistics.median(found), 1), "us a decision", TARGET, found, about)


if __name__ == "__main__":
    main()
