"""Latency against training over `--train-weight`, for `slack`: the real scheduler and engine loop in virtual time.

    python -m benchmarks.scheduling.train_weight --out benchmarks/results

Two requests a second of 64 prompt tokens and 64 output tokens, targets 1 s and 50 ms, beside a job that always has
work. A generation step takes 8 ms and 5 us a token, a micro-step of training 4 ms. Needs no GPU; says what the weight
does, not what a GPU reaches.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, quantiles

from benchmarks.common.options import make_parser
from benchmarks.common.results import Results
from coserve.core.link.generation import Generate, Tokens
from coserve.core.link.jobs import JobProgress, StartJob
from coserve.core.link.link import ToEngine
from coserve.core.sampling import SamplingParams
from coserve.core.types import Slo
from coserve.queues.policies.slack import Slack
from tests.support.fake_ports import JobPlan, Prices
from tests.support.scenario import Outcome, Scenario, job_spec, play

WEIGHTS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
SECONDS, RATE, TOKENS = 60.0, 2.0, 64
SLO = Slo(ttft=1.0, tpot=0.05)
MICRO_STEPS, MICRO_STEP = 8, 0.004


@dataclass(frozen=True)
class Point:
    """Seconds, and training as a share of what it does without requests."""

    ttft_p90: float
    tpot_mean: float
    training: float


def scenario(weight: float) -> Scenario:
    rng, at, script = random.Random(0), 0.0, list[tuple[float, ToEngine]]()
    while (at := at + rng.expovariate(RATE)) < SECONDS:
        sampling = SamplingParams(max_tokens=TOKENS)
        request = Generate(id=f"r{len(script)}", prompt=(1,) * 64, sampling=sampling, adapter=None, slo=SLO)
        script.append((at, request))
    steps = round(SECONDS / MICRO_STEPS / MICRO_STEP)
    return Scenario(
        seed=0,
        policy=Slack(patience=1.0, weight=weight),
        script=((0.0, StartJob(spec=job_spec("j"))), *script),
        plans={"j": JobPlan(steps, MICRO_STEPS, 1 << 20, None)},
        prices=Prices(step=0.008, token=5e-6, micro_step=MICRO_STEP, spikes=0.0),
        max_running=64,
        max_queue=1024,
        fair=True,
        max_active_jobs=1,
        step_tokens=2048,
        chaos=0.0,
        patience=1.0,
        delay=0.0,
    )


def point(outcome: Outcome) -> Point:
    ttfts, tpots = list[float](), list[float]()
    for id, sent in outcome.sent.items():
        times = [at for at, message in outcome.of(id) if isinstance(message, Tokens)]
        ttfts.append(times[0] - sent)
        tpots.append(mean(b - a for a, b in pairwise(times)))
    last = max(at for at, message in outcome.messages if isinstance(message, Tokens))
    steps = sum(isinstance(message, JobProgress) and at <= last for at, message in outcome.messages)
    return Point(quantiles(ttfts, n=10)[-1], mean(tpots), steps * MICRO_STEPS * MICRO_STEP / last)


def main() -> None:
    options = make_parser(__doc__).parse_args()
    settings = {"seconds": SECONDS, "rate": RATE, "tokens": TOKENS, "ttft": SLO.ttft, "tpot": SLO.tpot}
    results = Results.of(
        options,
        "train_weight.json",
        script="benchmarks.scheduling.train_weight",
        hardware="any: virtual time",
        seed=0,
        settings=settings,
    )
    for weight in WEIGHTS:
        found = point(play(scenario(weight)))
        name = f"train_weight.w{round(100 * weight)}"
        results.put(f"{name}.training", round(found.training, 3), "share of training alone")
        results.put(f"{name}.tpot", round(1e3 * found.tpot_mean, 1), "ms, mean")
        results.put(f"{name}.ttft", round(1e3 * found.ttft_p90, 1), "ms, p90")


if __name__ == "__main__":
    main()
