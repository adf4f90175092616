"""Attainment and training share of `slack` beside a job that always has work: the real engine loop over a GPU in
virtual time.

    python -m benchmarks.scheduling.slack_risk --out benchmarks/results

The GPU's times are about those of an 8B model on an H200 (a decode step of 5 to 8 ms, prompts at 25 us a token,
micro-steps of 3 to 8 ms, fine-tuning alone about 9,500 tokens/s), with normal errors of 4% and pauses of 10 ms in one
of 300. Steps overlap the host's work, as on a GPU. Requests are Poisson, prompts and answers log-normal with medians
160 and 180, over 32 adapters. A request is in its targets if its first token is, and its mean time between tokens. Over
capacity (`over.*`), requests may be refused: how many are served in time, how many of the others were told within 0.1
s, and whose first token came late. Needs no GPU; says what the policy does with errors of prediction, not what a GPU
reaches.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from msgspec import structs

from benchmarks.common.options import make_parser
from benchmarks.common.results import Results
from coserve.core.link.engine import EngineStopped, Shutdown
from coserve.core.link.generation import Generate, RequestFailed, Tokens
from coserve.core.link.jobs import StartJob
from coserve.core.link.link import FromEngine, ToEngine
from coserve.core.sampling import SamplingParams
from coserve.core.training.micro_step import MicroStep
from coserve.core.types import AdapterRef, Slo
from coserve.engine.engine import Engine
from coserve.engine.job_runner import JobPlaces
from coserve.engine.spatial.slices_in_flight import TURNS, Marks
from coserve.queues.policies.slack import Slack
from coserve.queues.policy import Policy
from coserve.queues.shapes import StepShape
from tests.support import fake_ports
from tests.support.fake_gpu import BlockingTrainer, Noise, OverlappedGenerator, job_always
from tests.support.fake_ports import FakeGenerator, FakeTrainer, Inline, Meter, NoAdapters
from tests.support.local_link import LocalLink
from tests.support.scenario import job_spec
from tests.support.virtual_clock import run_virtual

SECONDS, LEAD = 60.0, 5.0
LOADS = {
    "r5": (5.0, Slo(ttft=5.0, tpot=0.045)),
    "r20": (20.0, Slo(ttft=5.0, tpot=0.045)),
    "strict.r5": (5.0, Slo(ttft=1.0, tpot=0.02)),
    "strict.r20": (20.0, Slo(ttft=1.0, tpot=0.02)),
}
OVER = {"r80": (80.0, 5.0), "strict.r80": (80.0, 1.0), "strict.r120": (120.0, 1.0)}
"""Requests a second and the target of the first token, above the about 57 that are answered; each request may be
refused."""
AT_ONCE = 0.1
MICRO_SECONDS = {
    MicroStep.BEGIN: 3.5e-3,
    MicroStep.FORWARD: 3.5e-3,
    MicroStep.HEAD: 3e-3,
    MicroStep.BACKWARD: 8e-3,
    MicroStep.OPTIMIZER: 6e-3,
}
"""For 4,096 tokens."""


@dataclass(frozen=True)
class Point:
    attainment: float
    deadlines: float
    """Share of all tokens within their deadlines: the k-th after the first is due k targets after it."""
    ttft_p50: float
    ttft_p99: float
    tpot: float
    training: float
    """Share of what training does alone."""


@dataclass(frozen=True)
class Overload:
    served: float
    """Requests a second with their first token in time."""
    late: float
    """Share of the requests with a first token in which it was late."""
    latest: float
    """Seconds by which it was late at most."""
    at_once: float
    """Share of the refused ones that were told within `AT_ONCE`."""


def step_seconds(shape: StepShape, prompts: float = 6.5e-3, decodes: float = 5e-3, a_decode: float = 4e-5) -> float:
    """`prompts`, `decodes`: of a step with prompts, and without, besides what it computes; `a_decode`: of each
    sequence."""
    fixed = prompts if shape.prefill else decodes
    rows = a_decode * shape.decodes + 2.5e-5 * shape.prefill
    return fixed + rows + 2.5e-8 * shape.kv_tokens + 1e-9 * shape.pairs


class Recording(LocalLink[FromEngine, ToEngine]):
    """The engine's end. Notes what is sent, and when."""

    def __init__(self, outbox: asyncio.Queue[FromEngine | None], inbox: asyncio.Queue[ToEngine | None]) -> None:
        super().__init__(outbox, inbox)
        self.sent: list[tuple[float, FromEngine]] = []

    def send(self, message: FromEngine) -> None:
        self.sent.append((asyncio.get_running_loop().time(), message))
        super().send(message)


def token_times(link: Recording) -> dict[str, list[float]]:
    """When each request's tokens were sent."""
    times = defaultdict[str, list[float]](list)
    for at, message in link.sent:
        if isinstance(message, Tokens):
            times[message.id].append(at)
    return times


def workload(rate: float, slo: Slo, seed: int) -> list[tuple[float, Generate]]:
    rng, at, found = random.Random(seed), LEAD, list[tuple[float, Generate]]()
    while (at := at + rng.expovariate(rate)) < LEAD + SECONDS:
        prompt, answer = (round(min(2000, max(4, rng.lognormvariate(math.log(m), 0.7)))) for m in (160, 180))
        adapter = AdapterRef(f"a{rng.randrange(32)}", 1)
        sampling = SamplingParams(max_tokens=answer)
        found.append(
            (at, Generate(id=f"r{len(found)}", prompt=(1,) * prompt, sampling=sampling, adapter=adapter, slo=slo))
        )
    return found


async def play(
    script: Sequence[tuple[float, ToEngine]],
    generator: FakeGenerator,
    trainer: FakeTrainer,
    policy: Policy,
    marks: Marks = TURNS,
    until: float = 0.0,
    jobs: JobPlaces | None = None,
) -> Recording:
    """Send the script, each message at its time, and run the engine until all requests have ended, at least to the time
    `until`; return what it sent."""
    loop = asyncio.get_running_loop()
    to_engine, from_engine = asyncio.Queue[ToEngine | None](), asyncio.Queue[FromEngine | None]()
    api: LocalLink[ToEngine, FromEngine] = LocalLink(to_engine, from_engine)
    link = Recording(from_engine, to_engine)
    engine = Engine(
        generator,
        trainer,
        NoAdapters(),
        policy,
        link,
        clock=loop.time,
        jobs=jobs or JobPlaces(1, Inline()),
        marks=marks,
    )
    run = asyncio.create_task(engine.run())
    open_requests = {message.id for _, message in script if isinstance(message, Generate)}

    async def send() -> None:
        for at, message in script:
            if at > loop.time():  # what is due is sent at once, as by an API in a process of its own
                await asyncio.sleep(at - loop.time())
            api.send(message)

    sending = asyncio.create_task(send())
    while open_requests:
        message = await api.receive()
        if isinstance(message, RequestFailed) or (isinstance(message, Tokens) and message.finished is not None):
            open_requests.discard(message.id)
    await sending
    await asyncio.sleep(max(0.0, until - loop.time()))
    api.send(Shutdown())
    while not isinstance(await api.receive(), EngineStopped):
        pass
    await run
    return link


async def _play(requests: list[tuple[float, Generate]], seed: int) -> tuple[Recording, BlockingTrainer]:
    loop, rng = asyncio.get_running_loop(), random.Random(seed)
    steps, slices = Noise(rng, 0.04, 1 / 300), Noise(rng, 0.03, 1 / 300)
    generator = OverlappedGenerator(lambda shape: steps(step_seconds(shape)), 1.5e-3, 2048, rng, max_running=256)
    spec = job_spec("j")
    trainer = BlockingTrainer(Meter(), fake_ports.Prices(0, 0, 0, 0), job_always(spec), rng, loop.time)
    sizes = random.Random(seed + 1)
    batches = [sizes.randint(3000, 4096) for _ in range(1000)]
    trainer.batch_tokens = lambda step: batches[step % len(batches)]
    trainer.seconds = lambda kind, tokens: slices(MICRO_SECONDS[kind] * tokens / 4096)
    return await play([(0.0, StartJob(spec=spec)), *requests], generator, trainer, Slack(patience=1.0)), trainer


def point(rate: float, slo: Slo, seed: int) -> Point:
    fake_ports.CONTEXT = 1 << 20
    requests = workload(rate, slo, seed)
    link, trainer = run_virtual(_play(requests, seed))
    times = token_times(link)
    ttfts, tpots, good, kept, tokens = list[float](), list[float](), 0, 0, 0
    for at, request in requests:
        own = times[request.id]
        gaps = [b - a for a, b in pairwise(own)]
        ttfts.append(own[0] - at)
        tpots.append(sum(gaps) / len(gaps))
        good += ttfts[-1] <= slo.ttft and tpots[-1] <= slo.tpot
        kept += (ttfts[-1] <= slo.ttft) + sum(at - own[0] <= k * slo.tpot for k, at in enumerate(own[1:], 1))
        tokens += len(own)
    window = [tokens for at, tokens in trainer.trained_steps if LEAD <= at <= LEAD + SECONDS]
    alone = sum(MICRO_SECONDS[kind] for kind in trainer.kinds(trainer.plans["j"])) / 4096
    ttfts.sort()
    return Point(
        good / len(requests),
        kept / tokens,
        median(ttfts),
        ttfts[len(ttfts) * 99 // 100],
        sum(tpots) / len(tpots),
        sum(window) * alone / SECONDS,
    )


def overload(rate: float, ttft: float, seed: int) -> Overload:
    fake_ports.CONTEXT = 1 << 20
    slo = Slo(ttft=ttft, tpot=0.045, shed=True)
    requests = [(at, structs.replace(request, arrived=at)) for at, request in workload(rate, slo, seed)]
    link, _ = run_virtual(_play(requests, seed))
    firsts, refused = dict[str, float](), dict[str, float]()
    for at, message in link.sent:
        if isinstance(message, RequestFailed):
            refused[message.id] = at
        elif isinstance(message, Tokens):
            firsts.setdefault(message.id, at)
    arrived = {request.id: at for at, request in requests}
    over = [at - arrived[id] - ttft for id, at in firsts.items() if id not in refused]
    late = [seconds for seconds in over if seconds > 0]
    told = [at - arrived[id] <= AT_ONCE for id, at in refused.items()]
    return Overload(
        (len(over) - len(late)) / SECONDS,
        len(late) / max(1, len(over)),
        max(late, default=0.0),
        sum(told) / max(1, len(told)),
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--label", default="", help="part of the keys, to compare two commits")
    options = parser.parse_args()
    settings = {
        "seconds": SECONDS,
        "lead": LEAD,
        "loads": {name: rate for name, (rate, _) in LOADS.items()},
        "over": OVER,
    }
    results = Results.of(options, "slack_risk.json", __file__, settings, hardware="any: virtual time")
    for load, (rate, slo) in LOADS.items():
        found = point(rate, slo, 0)
        name = f"slack_risk.{load}" + (f".{options.label}" if options.label else "")
        results.put(f"{name}.slo", round(found.attainment, 4), "share of requests in their targets")
        results.put(f"{name}.deadlines", round(found.deadlines, 4), "share of tokens in their deadlines")
        results.put(f"{name}.ft_share", round(found.training, 3), "share of training alone")
        results.put(f"{name}.ttft_p50", round(1e3 * found.ttft_p50, 1), "ms")
        results.put(f"{name}.ttft_p99", round(1e3 * found.ttft_p99, 1), "ms")
        results.put(f"{name}.tpot", round(1e3 * found.tpot, 1), "ms, mean")
    for load, (rate, ttft) in OVER.items():
        over = overload(rate, ttft, 0)
        name = f"slack_risk.over.{load}" + (f".{options.label}" if options.label else "")
        results.put(f"{name}.served", round(over.served, 2), "requests/s with their first token in time")
        results.put(f"{name}.late", round(over.late, 4), "share of the first tokens that are late")
        results.put(f"{name}.latest", round(1e3 * over.latest, 1), "ms, the latest")
        results.put(f"{name}.at_once", round(over.at_once, 3), f"share of the refused that are told within {AT_ONCE} s")


if __name__ == "__main__":
    main()
