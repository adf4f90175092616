"""Attainment and training share of `overlap`: the real engine loop over a GPU in virtual time that computes steps and
training at once.

    python -m benchmarks.scheduling.overlap_risk --out benchmarks/results
    python -m benchmarks.scheduling.overlap_risk --speeds 0.35,0.5 --label slow_beside --out benchmarks/results

Loads, requests and micro-steps are those of `scheduling/slack_risk.py`. Steps take about as long as those of an 8B
model on an H200 with 32 adapters (200 decodes 11 ms, with the prompts of two requests 21), and beside training 2.4
times as long, while training has 0.8 of its speed. One step in twenty takes 1.2 to 2 times as long as the others, one
in a hundred 2 to 4 times, as in a log of decisions on a GPU. `samples` adds to the load r5, with targets of 1 s and 50
ms, the samples of eight training sessions: each asks for 64 answers of 256 tokens of the batch class at once, about
every 10 s. Needs no GPU; says what the policy does with such times, not what a GPU reaches.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from benchmarks.common.options import make_parser
from benchmarks.common.results import Results
from benchmarks.scheduling.slack_risk import (
    LEAD,
    LOADS,
    MICRO_SECONDS,
    SECONDS,
    Recording,
    play,
    step_seconds,
    token_times,
    workload,
)
from coserve.core.link.generation import Generate
from coserve.core.link.jobs import StartJob
from coserve.core.link.link import ToEngine
from coserve.core.sampling import SamplingParams
from coserve.core.training.micro_step import MicroStep
from coserve.core.types import AdapterRef, Slo
from coserve.engine.spatial.slices_in_flight import Marks
from coserve.queues.policies.overlap import Overlap
from tests.support import fake_ports
from tests.support.fake_gpu import Noise, job_always
from tests.support.fake_ports import FREE, Meter
from tests.support.scenario import job_spec
from tests.support.shared_gpu import SharedGpu, SharingGenerator, SharingTrainer
from tests.support.virtual_clock import run_virtual

STEP_SPEED, TRAIN_SPEED = 0.41, 0.8
"""Of each beside the other."""
SAMPLES, SESSIONS = "samples", 8
STEP = 5.5e-3, 4.5e-3, 2.4e-5
"""See `step_seconds`."""
SLOW, VERY_SLOW = (0.05, 1.2, 2.0), (0.01, 2.0, 4.0)
"""Share of the steps, and the range of factors by which they take longer."""


@dataclass(frozen=True)
class Point:
    attainment: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    training: float
    """Share of what training does alone."""
    beside: float
    """Share of the time in which both were computed."""


def slower(rng: random.Random) -> float:
    """A factor of a step's time."""
    drawn, usual = rng.random(), max(0.7, rng.gauss(1.0, 0.04))
    for share, least, most in (VERY_SLOW, SLOW):
        if drawn < share:
            return usual * rng.uniform(least, most)
        drawn -= share
    return usual


def sampled(seed: int) -> list[tuple[float, Generate]]:
    """What the sessions ask for."""
    rng, slo = random.Random(seed), Slo(ttft=60.0, tpot=1.0, batch=True)
    sampling, found = SamplingParams(max_tokens=256), list[tuple[float, Generate]]()
    for session in range(SESSIONS):
        adapter, at = AdapterRef(f"s{session}", 1), LEAD + rng.uniform(0, 3)
        while at < LEAD + SECONDS:
            found += [
                (
                    at,
                    Generate(
                        id=f"{adapter.id}-{len(found)}-{i}",
                        prompt=(1,) * 64,
                        sampling=sampling,
                        adapter=adapter,
                        slo=slo,
                    ),
                )
                for i in range(64)
            ]
            at += rng.uniform(9, 11)
    return found


async def _play(
    requests: list[tuple[float, Generate]], seed: int, speeds: tuple[float, float]
) -> tuple[Recording, float, float]:
    """What was sent, and shares of the arrivals' time: training, alone, and both at once."""
    loop, rng = asyncio.get_running_loop(), random.Random(seed)
    gpu = SharedGpu(*speeds)
    generator = SharingGenerator(
        lambda shape: slower(rng) * step_seconds(shape, *STEP), 1.5e-3, 2048, rng, max_running=256
    )
    generator.gpu = gpu
    spec = job_spec("j")
    trainer = SharingTrainer(Meter(), FREE, job_always(spec), rng, loop.time, gpu=gpu)
    sizes, slices = random.Random(seed + 1), Noise(rng, 0.03, 1 / 300)
    batches = [sizes.randint(3600, 4096) for _ in range(1000)]
    trainer.batch_tokens = lambda step: batches[step % len(batches)]
    trainer.seconds = lambda kind, tokens: (
        0.0 if kind is MicroStep.RESULT else slices(MICRO_SECONDS[kind] * tokens / 4096)
    )
    both = list[float]()

    async def note_both() -> None:
        for at in (LEAD, LEAD + SECONDS):
            await asyncio.sleep(at - loop.time())
            both.append(gpu.both)

    noting = asyncio.create_task(note_both())
    marks = Marks(gpu.mark, gpu.between, gpu.mark_step)
    script: list[tuple[float, ToEngine]] = [(0.0, StartJob(spec=spec)), *requests]
    link = await play(script, generator, trainer, Overlap(1.0, floor=0.05), marks, until=LEAD + SECONDS)
    await noting
    trained = gpu.trained_at(LEAD + SECONDS) - gpu.trained_at(LEAD)
    return link, trained / SECONDS, (both[1] - both[0]) / SECONDS


def point(rate: float, slo: Slo, seed: int, speeds: tuple[float, float], others: list[tuple[float, Generate]]) -> Point:
    """`speeds` of a step and of training beside each other. `others` are not counted."""
    fake_ports.CONTEXT = 1 << 20
    requests = workload(rate, slo, seed)
    everything = sorted([*requests, *others], key=lambda each: each[0])
    link, training, beside = run_virtual(_play(everything, seed, speeds))
    sent = token_times(link)
    times = {request.id: sent[request.id] for _, request in requests}
    ttfts = {request.id: times[request.id][0] - at for at, request in requests}
    tpots = {id: sum(b - a for a, b in pairwise(own)) / max(1, len(own) - 1) for id, own in times.items()}
    good = sum(ttfts[id] <= slo.ttft and tpots[id] <= slo.tpot for id in times)
    firsts = sorted(ttfts.values())
    return Point(
        good / len(requests), median(firsts), firsts[len(firsts) * 99 // 100], median(tpots.values()), training, beside
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--label", default="", help="part of the keys, to compare two commits")
    loads = LOADS | {SAMPLES: (5.0, Slo(ttft=1.0, tpot=0.05))}
    parser.add_argument("--loads", default=",".join(loads), help="some of them, separated by commas")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each load, with other requests and times")
    parser.add_argument(
        "--speeds",
        default=f"{STEP_SPEED},{TRAIN_SPEED}",
        help="of a step and of training, each beside the other, as shares",
    )
    options = parser.parse_args()
    step_speed, train_speed = (float(part) for part in options.speeds.split(","))
    settings = {"seconds": SECONDS, "lead": LEAD, "speeds": (step_speed, train_speed), "seeds": options.seeds}
    results = Results.of(options, "overlap_risk.json", __file__, settings, hardware="any: virtual time")
    for load in options.loads.split(","):
        rate, slo = loads[load]
        points = [
            point(rate, slo, seed, (step_speed, train_speed), sampled(seed) if load == SAMPLES else [])
            for seed in range(options.seeds)
        ]
        name = f"overlap_risk.{load}" + (f".{options.label}" if options.label else "")
        least = min(each.attainment for each in points)
        results.put(f"{name}.slo", round(least, 4), "share of requests in their targets, the worst run")
        for key, unit, scale, values in (
            ("ft_share", "share of training alone, mean", 1.0, [each.training for each in points]),
            ("beside", "share of the time in which both were computed", 1.0, [each.beside for each in points]),
            ("ttft_p50", "ms", 1e3, [each.ttft_p50 for each in points]),
            ("ttft_p99", "ms", 1e3, [each.ttft_p99 for each in points]),
            ("tpot_p50", "ms", 1e3, [each.tpot_p50 for each in points]),
        ):
            about = {"runs": [round(scale * value, 4) for value in values]}
            results.put(f"{name}.{key}", round(scale * sum(values) / len(values), 4), unit, about=about)


if __name__ == "__main__":
    main()
