"""Scenarios of users' requests and jobs, made from a seed; `play` runs the real engine through one in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from coserve.core.link import jobs
from coserve.core.link.engine import EngineStopped, Shutdown
from coserve.core.link.generation import CancelRequest, Generate, RequestFailed, Tokens
from coserve.core.link.link import FromEngine, ToEngine
from coserve.core.sampling import SamplingParams
from coserve.core.training.jobs import JobSpec
from coserve.core.training.settings import TrainingSettings
from coserve.core.types import AdapterRef, LoraSettings, Slo
from coserve.engine.engine import Engine
from coserve.engine.job_runner import JobPlaces
from coserve.engine.spatial.slices_in_flight import Marks
from coserve.queues.policies.inference_first import InferenceFirst
from coserve.queues.policies.overlap import Overlap
from coserve.queues.policies.paper import Ets, TemporalSharing
from coserve.queues.policies.slack import Slack
from coserve.queues.policies.spatial import Spatial
from coserve.queues.policy import Costs, Decision, NamedPolicy, Policy, View, Wait
from tests.support.fake_device import FakeDevice, LaunchingTrainer
from tests.support.fake_ports import (
    CONTEXT,
    FakeGenerator,
    FakeTrainer,
    Inline,
    JobPlan,
    Meter,
    NoAdapters,
    Prices,
    adapters_on_disk,
)
from tests.support.local_link import LocalLink
from tests.support.records import make_spec
from tests.support.virtual_clock import VirtualClockLoop, run_virtual


@dataclass(frozen=True)
class Scenario:
    """Everything that a run depends on. `script` is what the API process sends, and when."""

    policy: Policy
    script: tuple[tuple[float, ToEngine], ...]
    prices: Prices
    max_running: int
    plans: dict[str, JobPlan] = field(default_factory=dict)
    seed: int = 0
    max_queue: int = 1 << 20
    fair: bool = True
    max_active_jobs: int = 1
    step_tokens: int = 256
    chaos: float = 0.0
    patience: float = 0.0
    delay: float = 0.0
    cold: float = 0.0
    """Mean seconds of reading an adapter; 0: all are in memory."""
    share: float | None = None
    """Of the device, for training beside generation: each side's `prices` are those of the whole device. None: they
    take turns."""
    batch_rows: int | None = None
    """As `FakeTrainer` has it."""
    sample_every: int | None = None
    """Steps of each job after which samples are generated, one after another, as the API process asks for them; None:
    never."""

    def without_jobs(self) -> Scenario:
        kept = tuple(event for event in self.script if isinstance(event[1], Generate | CancelRequest))
        return replace(self, script=kept, plans={})


def make_scenario(seed: int, *, policy: str, calm: bool = False, cold: bool = False) -> Scenario:
    """`calm`: no cancels, failures or spikes, long queue, and gaps that leave the engine time to breathe. `cold`:
    adapters are read from disk, and few stay in memory."""
    rng, rows = random.Random(f"{seed} {policy} {calm}" + " cold" * cold), random.Random(f"rows {seed}")
    delay, patience, max_running = rng.uniform(0, 2), rng.uniform(0, 1), rng.randint(4 if calm else 1, 8)
    policies: dict[str, Policy] = {
        "ets": Ets(max_running, delay),
        "ts": TemporalSharing(n := rng.randint(1, 4), max_running, delay),
        "ts-batch": TemporalSharing(n, max_running, delay, "batch"),
        "inference-first": InferenceFirst(),
        "slack": Slack(patience),
        "spatial": Spatial(),
        "overlap": Overlap(patience),
        "overlap-between": Overlap(patience, overlapped=False),
    }
    plans = {
        f"j{i}": JobPlan(
            steps=rng.randint(1, 6),
            micro_steps=rng.randint(1, 8),
            checkpoint_every=rng.randint(1, 4),
            fails_at=None if calm or rng.random() < 0.75 else rng.randint(0, 6),
            rows=rows.choice((None, 3, 5, 8)),
            evaluate_every=rows.choice((None, 2)),
        )
        for i in range(rng.randint(0, 4))
    }
    script = _requests(rng, calm) + _jobs(rng, plans, calm)
    return Scenario(
        seed=seed,
        policy=policies[policy],
        script=tuple(sorted(script, key=lambda event: event[0])),
        plans=plans,
        prices=Prices(
            step=rng.uniform(0.005, 0.02),
            token=rng.uniform(0, 5e-4),
            micro_step=rng.uniform(0.002, 0.05),
            spikes=0.0 if calm else rng.choice((0, 0.05)),
        ),
        max_running=max_running,
        max_queue=1000 if calm else rng.choice((2, 10, 1000)),
        fair=rng.random() < 0.7,
        max_active_jobs=rng.randint(1, 3),
        step_tokens=rng.choice((16, 64, 256)),
        chaos=0.0 if calm else rng.choice((0, 0.02)),
        patience=patience,
        delay=delay,
        cold=rng.uniform(0.01, 1.0) if cold else 0.0,
        share=rng.uniform(0.2, 0.8) if policy in ("spatial", "overlap", "overlap-between") else None,
        batch_rows=rows.choice((None, 16)),
    )


def _requests(rng: random.Random, calm: bool) -> list[tuple[float, ToEngine]]:
    script: list[tuple[float, ToEngine]] = []
    at, gap = 0.0, 1.0 if calm else rng.choice((0.02, 0.1, 1.0))
    for i in range(rng.randint(0, 25)):
        at += rng.uniform(gap / 2, gap) if calm else rng.expovariate(1 / gap) * (rng.random() < 0.7)
        length = rng.randint(1, 20) if calm else rng.randint(1, CONTEXT + 4)
        request = Generate(
            id=f"r{i}",
            prompt=tuple(rng.randrange(100) for _ in range(length)),
            sampling=SamplingParams(max_tokens=rng.randint(1, 8), seed=rng.randrange(1 << 30)),
            adapter=rng.choice((None, AdapterRef("a", 1), AdapterRef("b", 2))),
            slo=Slo(ttft=rng.uniform(0.3, 2), tpot=rng.uniform(0.05, 0.3)),
        )
        script.append((at, request))
        if not calm and rng.random() < 0.2:
            script.append((at + rng.expovariate(3), CancelRequest(id=request.id)))
    return script


def _jobs(rng: random.Random, plans: dict[str, JobPlan], calm: bool) -> list[tuple[float, ToEngine]]:
    script: list[tuple[float, ToEngine]] = []
    for id in plans:
        at = rng.uniform(0, 3)
        script.append((at, jobs.StartJob(spec=job_spec(id), paused=not calm and rng.random() < 0.1)))
        for _ in range(0 if calm else rng.randint(0, 4)):
            at += rng.expovariate(2)
            kind = rng.choices((jobs.PauseJob, jobs.ResumeJob, jobs.CancelJob), (4, 5, 1))[0]
            script.append((at, kind(id=id)))
    return script


def job_spec(id: str) -> JobSpec:
    return make_spec(
        id, f"adapter-{id}", lora=LoraSettings(), training=TrainingSettings(steps=1), rows=1, tokens=1, target_tokens=1
    )


@dataclass
class Outcome:
    """What the API process saw, with times, and the fakes as the engine left them."""

    scenario: Scenario
    generator: FakeGenerator
    trainer: FakeTrainer
    meter: Meter
    device: FakeDevice
    messages: list[tuple[float, FromEngine]] = field(default_factory=list)
    sent: dict[str, float] = field(default_factory=dict)
    cancelled: dict[str, float] = field(default_factory=dict)
    """Requests that the script cancelled before their end was seen."""

    def of(self, id: str) -> list[tuple[float, FromEngine]]:
        return [(at, message) for at, message in self.messages if getattr(message, "id", None) == id]

    def tokens(self, id: str) -> tuple[int, ...]:
        return tuple(t for _, message in self.of(id) if isinstance(message, Tokens) for t in message.tokens)

    def ends(self) -> Counter[str]:
        """How often each request and job was said to have ended."""
        return Counter(message.id for _, message in self.messages if _ends(message))


def _ends(message: FromEngine) -> bool:
    if isinstance(message, Tokens):
        return message.finished is not None
    return isinstance(message, RequestFailed | jobs.JobSucceeded | jobs.JobFailed | jobs.JobCancelled)


class Watched:
    """A policy under watch: a decision that changed nothing is not made again, unless `event` was called between.

    Time is a change to one who waits for it, and to nobody else. `done` counts what generation and training have
    computed.
    """

    def __init__(self, policy: Policy, done: Callable[[], object]) -> None:
        self._policy, self._done = policy, done
        self._last: object = None

    def event(self) -> None:
        self._last = None

    def decide(self, view: View, now: float) -> Decision:
        decision = self._policy.decide(view, now)
        waits_for_time = isinstance(decision, Wait) and decision.until is not None
        state = replace(view, train_waiting_since=None, costs=Costs(0.0, 0.0))
        made = decision, state, self._done(), now if waits_for_time else None
        assert made != self._last, f"changed nothing, and is repeated: {made}"
        self._last = made
        return decision


class _WatchedLink(LocalLink[FromEngine, ToEngine]):
    """The engine's end: what comes in is an event."""

    event: Callable[[], None]

    async def receive(self) -> ToEngine:
        message = await super().receive()
        self.event()
        return message


SAMPLES = 2
"""Of a snapshot."""


class _Api:
    """The other end of the link: sends the script, notes the answers, says when all has ended."""

    def __init__(self, outcome: Outcome, link: LocalLink[ToEngine, FromEngine]) -> None:
        self._outcome, self._link = outcome, link
        self._open: set[str] = set()
        self._quiet = asyncio.Event()
        self._sampled: dict[str, tuple[jobs.JobSnapshot, int]] = {}
        """Requests for a sample, each with its snapshot and how many follow it."""

    async def send_script(self) -> None:
        clock = asyncio.get_running_loop().time
        for at, message in self._outcome.scenario.script:
            await asyncio.sleep(at - clock())
            self._note(message, clock())
            self._link.send(message)
        for job in self._outcome.scenario.plans:
            self._link.send(jobs.ResumeJob(id=job))  # whatever was left paused runs to its end
        await self._until_quiet()
        self._link.send(Shutdown())

    def _note(self, message: ToEngine, now: float) -> None:
        match message:
            case Generate(id=id):
                self._outcome.sent[id] = now
                self._open.add(id)
            case jobs.StartJob(spec=spec):
                self._open.add(spec.id)
            case CancelRequest(id=id) if id in self._open:
                self._outcome.cancelled[id] = now
                self._open.discard(id)
            case _:
                pass

    async def _until_quiet(self) -> None:
        while self._open:
            self._quiet.clear()
            await self._quiet.wait()

    def _sample(self, snapshot: jobs.JobSnapshot, count: int) -> None:
        """Ask for `count` samples, one after another; without any, the job goes on."""
        if not count:
            self._link.send(jobs.SnapshotDone(id=snapshot.id, ref=snapshot.ref))
            return
        id = f"{snapshot.ref} {len(self._outcome.messages)}"
        self._sampled[id] = snapshot, count - 1
        self._open.add(id)
        sampling, slo = SamplingParams(max_tokens=3, seed=count), Slo(ttft=1.0, tpot=0.2)
        self._link.send(Generate(id=id, prompt=(1, 2), sampling=sampling, adapter=snapshot.ref, slo=slo))

    async def listen(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            message = await self._link.receive()
            self._outcome.messages.append((clock(), message))
            if isinstance(message, jobs.JobSnapshot):
                self._sample(message, SAMPLES)
            elif _ends(message):
                self._open.discard(message.id)
                self._quiet.set()
                if message.id in self._sampled:
                    self._sample(*self._sampled.pop(message.id))
            if isinstance(message, EngineStopped):
                return


def _slower(prices: Prices, share: float) -> Prices:
    """On that share of the device."""
    return Prices(prices.step / share, prices.token / share, prices.micro_step / share, prices.spikes)


async def _play(scenario: Scenario) -> Outcome:
    loop, rng, meter = asyncio.get_running_loop(), random.Random(scenario.seed), Meter()
    share, prices, device = scenario.share, scenario.prices, FakeDevice(meter)
    if share is None:
        trainer = FakeTrainer(meter, prices, scenario.plans, rng, loop.time, batch_rows=scenario.batch_rows)
    else:
        slower = _slower(prices, share)
        trainer = LaunchingTrainer(device, slower, scenario.plans, rng, loop.time, batch_rows=scenario.batch_rows)
        prices = _slower(prices, 1 - share)
    trainer.sample_every = scenario.sample_every
    policy = Watched(scenario.policy, lambda: (generator.tokens_computed, len(trainer.gaps)))
    device.ended = policy.event
    to_engine, from_engine = asyncio.Queue[ToEngine | None](), asyncio.Queue[FromEngine | None]()
    api_end, engine_end = LocalLink(to_engine, from_engine), _WatchedLink(from_engine, to_engine)
    engine_end.event = policy.event
    if scenario.cold:
        assert isinstance(loop, VirtualClockLoop)
        loop.thread_seconds = lambda: rng.expovariate(1 / scenario.cold)
    adapters = adapters_on_disk(1, policy.event) if scenario.cold else NoAdapters()
    generator = FakeGenerator(
        meter,
        prices,
        scenario.step_tokens,
        rng,
        scenario.chaos,
        max_running=scenario.max_running,
        max_queue=scenario.max_queue,
        fair=scenario.fair,
        store=adapters,
    )

    def read_again() -> None:
        policy.event()
        adapters.changed()

    generator.read = read_again
    engine = Engine(
        generator,
        trainer,
        adapters,
        policy,
        engine_end,
        clock=loop.time,
        jobs=JobPlaces(scenario.max_active_jobs, Inline(), first_come=_first_come(scenario.policy)),
        marks=Marks(None if share is None else device.mark),
        pace=meter.pace,
    )
    outcome = Outcome(scenario, generator, trainer, meter, device)
    api = _Api(outcome, api_end)
    async with asyncio.TaskGroup() as group:
        group.create_task(api.listen())
        group.create_task(api.send_script())
        group.create_task(engine.run())
    return outcome


def _first_come(policy: Policy) -> bool:
    return isinstance(policy, NamedPolicy) and policy.in_batches


def play(scenario: Scenario) -> Outcome:
    """Live through the scenario; raises what the engine or a fake raised, `Deadlock` if the end never comes."""
    return run_virtual(_play(scenario))
