"""The engine with jobs that can be held up, or raise, wherever they work. On the real loop, with real threads."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from coserve.admission.memory import HostAdmission
from coserve.core.cancellation import Cancellation, Cancelled
from coserve.core.link.engine import Shutdown
from coserve.core.link.generation import Generate, Tokens
from coserve.core.link.jobs import JobCheckpoint, JobStarted, StartJob
from coserve.core.link.link import FromEngine, ToEngine
from coserve.core.link.stats import EngineStats
from coserve.core.sampling import SamplingParams
from coserve.core.training.jobs import JobSpec
from coserve.core.training.micro_step import MicroStep
from coserve.core.types import AdapterRef, Slo
from coserve.engine.engine import Engine
from coserve.engine.job_memory import DeviceMemory
from coserve.engine.job_runner import JobPlaces
from coserve.engine.spatial.slices_in_flight import Mark, Marks
from coserve.queues.policies.slack import Slack
from coserve.queues.policies.spatial import Spatial
from coserve.queues.request import Request
from tests.support.fake_ports import FREE, FakeGenerator, FakeTrainer, JobPlan, Meter, NoAdapters
from tests.support.local_link import LocalLink, local_pair
from tests.support.records import make_request, make_spec

PLANS = {job: JobPlan(steps=5, micro_steps=4, checkpoint_every=2, fails_at=None) for job in ("one", "two")}


@dataclass
class Trouble(FakeTrainer):
    """Raises `error` in `operation` of job `one`; its loads wait for `go`."""

    operation: str = ""
    error: type[Exception] = ZeroDivisionError
    go: threading.Event = field(default_factory=threading.Event)
    loading: threading.Event = field(default_factory=threading.Event)
    stopped: threading.Event = field(default_factory=threading.Event)
    threads: set[int] = field(default_factory=set)
    holds: str = ""
    """Job `one` waits in this operation of its threads for `gate`."""
    gate: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)

    def _trouble(self, operation: str, job: str) -> None:
        if job == "one" and operation == self.operation:
            raise self.error("in /some/private/path")

    def load(self, spec: JobSpec, cancellation: Cancellation) -> Callable[[], JobStarted]:
        self.threads.add(threading.get_ident())
        self.loading.set()
        while not self.go.wait(0.002):
            try:
                cancellation.check()
            except Cancelled:
                self.stopped.set()
                raise
        self._trouble("load", spec.id)
        start = super().load(spec, cancellation)

        def call() -> JobStarted:
            self._trouble("start", spec.id)
            return start()

        return call

    def preparation(self, job: str) -> Callable[[Cancellation], None] | None:
        self._trouble("preparation", job)

        return lambda cancellation: self.on_a_thread("prepare", job)

    def before_slice(self, job: str, kinds: Sequence[MicroStep]) -> None:
        if self.ran[job]:
            self._trouble("advance", job)

    def checkpoint(self, job: str) -> Callable[[], JobCheckpoint] | None:
        self._trouble("checkpoint", job)
        return super().checkpoint(job)

    def abandon(self, job: str, *, finish_update: bool = False) -> None:
        super().abandon(job)
        self._trouble("finish_update" if finish_update else "abandon", job)

    def on_a_thread(self, operation: str, job: str) -> None:
        self.threads.add(threading.get_ident())
        if job == "one" and operation == self.holds:
            self.reached.set()
            assert self.gate.wait(240)
        self._trouble(operation, job)

    def drop(self, job: str) -> None:
        super().drop(job)
        self._trouble("drop", job)


class Picky(FakeGenerator):
    def set_up(self, request: Request) -> None:
        if request.id == "poison":
            raise ZeroDivisionError("in /some/private/path")
        super().set_up(request)


@dataclass
class Scene:
    trainer: Trouble
    adapters: NoAdapters
    api: LocalLink[ToEngine, FromEngine]
    running: asyncio.Task[None]
    seen: list[FromEngine] = field(default_factory=list)
    stats: EngineStats | None = None
    """The last gauges."""

    async def until(self, *wanted: Callable[[FromEngine], bool]) -> list[FromEngine]:
        """All messages so far, once each of `wanted` was among them."""
        async with asyncio.timeout(240):
            while not all(any(map(one, self.seen)) for one in wanted):
                message = await self.api.receive()
                if not isinstance(message, EngineStats):
                    self.seen.append(message)
                else:
                    self.stats = message
        return self.seen

    async def loading(self) -> None:
        await asyncio.to_thread(self.trainer.loading.wait, 60)

    async def held(self) -> None:
        """Until job `one` waits at its gate."""
        assert await asyncio.to_thread(self.trainer.reached.wait, 240)


@asynccontextmanager
async def scene(
    operation: str = "",
    error: type[Exception] = ZeroDivisionError,
    active: int = 2,
    kind: type[Trouble] = Trouble,
    holds: str = "",
    memory: DeviceMemory | None = None,
    mark: Mark | None = None,
    memory_poll: float = 1.0,
) -> AsyncIterator[Scene]:
    """`mark`: slices are only launched; see `Mark`. `memory_poll`: see `JobPlaces`."""
    meter, rng, loop = Meter(), random.Random(0), asyncio.get_running_loop()
    trainer = kind(meter, FREE, PLANS, rng, loop.time, operation=operation, error=error, holds=holds)
    adapters = NoAdapters()
    api, engine_end = local_pair()
    engine = Engine(
        Picky(meter, FREE, 64, rng, 0.0),
        trainer,
        adapters,
        Slack(1.0) if mark is None else Spatial(),
        engine_end,
        clock=loop.time,
        jobs=JobPlaces(active, memory=memory or HostAdmission(), memory_poll=memory_poll),
        marks=Marks(mark),
    )
    running = asyncio.create_task(engine.run())
    try:
        yield Scene(trainer, adapters, api, running)
    finally:
        trainer.go.set()
        trainer.gate.set()
        api.send(Shutdown())
        await asyncio.gather(running, return_exceptions=True)


def ask(id: str, tokens: int = 5, adapter: AdapterRef | None = None) -> Generate:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return make_request(id, prompt=3, sampling=sampling, adapter=adapter, slo=Slo(ttft=60.0, tpot=60.0))


def start(id: str) -> StartJob:
    return StartJob(spec=make_spec(id, adapter=id))


def said(kind: type[FromEngine], id: str) -> Callable[[FromEngine], bool]:
    return lambda message: isinstance(message, kind) and message.id == id


def ended(id: str) -> Callable[[FromEngine], bool]:
    return lambda message: isinstance(message, Tokens) and message.id == id and message.finished is not None
