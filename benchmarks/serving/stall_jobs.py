"""Jobs that follow one another while requests are measured, and what a block of requests beside them gave."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from benchmarks.serving.http_case import RANK, Size, corpus
from benchmarks.serving.stall_report import trained_tokens
from coserve.client import Client
from coserve.core.errors import WrongJobState
from coserve.core.schemas.jobs import JobEvent
from coserve.core.training.jobs import JobState
from coserve.core.training.settings import TrainingSettings
from coserve.workloads.replay import Sample

Events = list[list[tuple[float, str]]]
"""Of each job: seconds since its first event, and what it says."""


@dataclasses.dataclass(frozen=True)
class Block:
    """`before`, `after`: Prometheus pages `seconds` apart. `events`: of the jobs that ended."""

    checkpoint_steps: int
    before: str
    after: str
    seconds: float
    samples: Sequence[Sample]
    events: Events

    def tokens_a_second(self) -> float:
        return trained_tokens(self.before, self.after) / self.seconds


@contextlib.contextmanager
def training_jobs(client: Client, size: Size, training: TrainingSettings, active: int) -> Iterator[Events]:
    """`active` jobs at a time, one after another; yields their events, which grow. The last ones are cancelled.

    Entered when a job has done two steps: the kernels are compiled.
    """
    rows, stopping, begun, ended = corpus(size), threading.Event(), threading.Event(), Events()

    def one(number: int) -> list[tuple[float, str]]:
        job = client.finetune(f"trained-{number}", rows, lora={"r": RANK}, training=msgspec.to_builtins(training))
        seen = list[JobEvent]()
        for event in job.events():
            seen.append(event)
            if event.state is JobState.FAILED:
                raise SystemExit(f"job {job.id}: {event.message}")
            if event.metrics is not None and event.metrics.step >= 2:
                begun.set()
            if stopping.is_set():
                with contextlib.suppress(WrongJobState):  # it has ended meanwhile
                    job.cancel()
                break
        return [(round(event.created_at - seen[0].created_at, 3), event.message) for event in seen]

    def line(number: int) -> None:
        try:
            while not stopping.is_set():
                events = one(number)
                if not stopping.is_set():
                    ended.append(events)
        finally:
            begun.set()  # a failure must not leave the other end waiting

    with ThreadPoolExecutor(active) as pool:
        running = [pool.submit(line, number) for number in range(active)]
        try:
            begun.wait(120)
            yield ended
        finally:
            stopping.set()
    for each in running:
        each.result()
