"""The ETS paper's load times 16 and 32 under `ets`, `slack` and `overlap`: the real engine loop over a GPU in virtual
time.

    python -m benchmarks.scheduling.ets_loads --out benchmarks/results
    python -m benchmarks.scheduling.ets_loads --policies overlap --factors 16 --targets 5,0.03 --label limits \
        --out benchmarks/results

Times are about those of GPT-2 medium on an H100 with 32 adapters of rank 32: a decode step of 64 sequences takes the
device 2.5 ms and the host 3.6, one with prompts 3.5 ms more, and training alone does 128,000 tokens/s in batches of 32
rows of 480 tokens. Prompts come in even steps, answers have 16 to 64 tokens, and training always has work. `targets`:
TTFT and TPOT of `slack` and `overlap`; `ets` has none. Needs no GPU; says what the policies do with such times, not
what a GPU reaches.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median

from benchmarks.common.options import make_parser
from benchmarks.common.results import Results
from benchmarks.scheduling.slack_risk import Recording, play, token_times
from coserve.core.link.generation import Generate
from coserve.core.link.jobs import StartJob
from coserve.core.sampling import SamplingParams
from coserve.core.training.micro_step import MicroStep
from coserve.core.types import AdapterRef, Slo
from coserve.engine.spatial.slices_in_flight import TURNS, Marks
from coserve.generate.plan import Ran, Scheduled
from coserve.queues.policies.overlap import Overlap
from coserve.queues.policies.paper import Ets
from coserve.queues.policies.slack import Slack
from coserve.queues.policy import Policy
from coserve.queues.shapes import StepShape
from tests.support import fake_ports
from tests.support.fake_gpu import Noise
from tests.support.fake_ports import FREE, JobPlan, Meter
from tests.support.scenario import job_spec
from tests.support.shared_gpu import SharedGpu, SharingGenerator, SharingTrainer, WholeTrainer
from tests.support.virtual_clock import run_virtual

SECONDS, LEAD = 4.0, 5.0
LAYERS, BATCH_TOKENS = 24, 32 * 480
MICRO_SECONDS = {
    MicroStep.BEGIN: 1.3e-3,
    MicroStep.FORWARD: 1.3e-3,
    MicroStep.HEAD: 2.1e-3,
    MicroStep.BACKWARD: 2.6e-3,
    MicroStep.OPTIMIZER: 1.5e-3,
    MicroStep.RESULT: 0.0,
}
"""Of a batch; training alone, 12 micro-steps of the head included, takes 0.12 s for it."""
HOST, HOST_ROW = 0.4e-3, 50e-6
"""Seconds that the host takes for a step, and for each of its sequences."""
PROMPTS, PROMPT_TOKEN = 3.5e-3, 5e-6
"""Seconds that a step with prompts takes the device beyond one without, and for each token of a prompt."""
BATCH, DELAY = 64, 5.0
RATE = 10.0
"""Requests a second of table 5.1."""


def step_seconds(shape: StepShape) -> float:
    prompts = PROMPTS + PROMPT_TOKEN * shape.prefill if shape.prefill else 0.0
    return 1.3e-3 + 18e-6 * shape.decodes + prompts


class HostGenerator(SharingGenerator):
    """The host's part of a step grows with its sequences."""

    steps = 0

    def run(self, scheduled: Sequence[Scheduled]) -> Ran:
        self.steps += bool(scheduled)
        return super().run(scheduled)

    def host_seconds(self, scheduled: Sequence[Scheduled]) -> float:
        return HOST + HOST_ROW * len(scheduled)


@dataclass(frozen=True)
class Point:
    training: float
    """Tokens a second while requests come."""
    latency: float
    within_1s: float
    within_10s: float
    tpot: float
    both: float
    """Share of the time in which a step and training were computed."""
    steps: float
    """Generation steps a second."""


def workload(factor: int, slo: Slo, seed: int) -> list[tuple[float, Generate]]:
    rng, found = random.Random(seed), list[tuple[float, Generate]]()
    for i in range(round(factor * RATE * SECONDS)):
        sampling = SamplingParams(max_tokens=rng.randint(16, 64))
        adapter, prompt = AdapterRef(f"a{rng.randrange(32)}", 1), (1,) * rng.randint(10, 60)
        at = LEAD + i / (factor * RATE)
        found.append((at, Generate(id=f"r{i}", prompt=prompt, sampling=sampling, adapter=adapter, slo=slo)))
    return found


def policies(tpot: float) -> dict[str, Policy]:
    return {
        "ets": Ets(BATCH, DELAY),
        "slack": Slack(1.0, floor=0.05, tpot=tpot),
        "overlap": Overlap(1.0, floor=0.05, tpot=tpot),
    }


async def _play(
    policy: Policy, requests: list[tuple[float, Generate]], seed: int, speeds: tuple[float, float]
) -> tuple[Recording, SharedGpu, int, float]:
    loop, rng = asyncio.get_running_loop(), random.Random(seed)
    gpu, batches = SharedGpu(*speeds), isinstance(policy, Ets)
    noise = Noise(rng, 0.04, 1 / 300, 2e-3)
    generator = HostGenerator(
        lambda shape: noise(step_seconds(shape)),
        0.0,
        2048,
        rng,
        max_running=BATCH if batches else 256,
        max_queue=1 << 15,
    )
    generator.gpu = gpu
    beside = isinstance(policy, Overlap)
    spec = job_spec("j")
    trainer = (SharingTrainer if beside else WholeTrainer)(
        Meter(), FREE, {spec.id: JobPlan(1 << 30, LAYERS, 1 << 30, None)}, rng, loop.time, gpu=gpu, launch=0.05
    )
    trainer.batch_tokens = lambda step: BATCH_TOKENS
    trainer.seconds = lambda kind, tokens: noise(MICRO_SECONDS[kind]) if MICRO_SECONDS[kind] else 0.0
    marks = Marks(gpu.mark, gpu.between, gpu.mark_step) if beside else TURNS
    link = await play([(0.0, StartJob(spec=spec)), *requests], generator, trainer, policy, marks)
    return link, gpu, generator.steps, gpu.both


def point(policy: Policy, factor: int, slo: Slo, seed: int, speeds: tuple[float, float]) -> Point:
    fake_ports.CONTEXT = 1 << 20
    requests = workload(factor, slo, seed)
    link, gpu, steps, both = run_virtual(_play(policy, requests, seed, speeds))
    times = token_times(link)
    latencies = [times[request.id][-1] - at for at, request in requests]
    whole = (
        MICRO_SECONDS[MicroStep.BEGIN]
        + (LAYERS - 1) * MICRO_SECONDS[MicroStep.FORWARD]
        + LAYERS // 2 * MICRO_SECONDS[MicroStep.HEAD]
        + LAYERS * MICRO_SECONDS[MicroStep.BACKWARD]
        + MICRO_SECONDS[MicroStep.OPTIMIZER]
    )
    trained = gpu.trained_at(LEAD + SECONDS) - gpu.trained_at(LEAD)
    return Point(
        trained / whole * BATCH_TOKENS / SECONDS,
        mean(latencies),
        sum(each <= 1 for each in latencies) / len(latencies),
        sum(each <= 10 for each in latencies) / len(latencies),
        median((own[-1] - own[0]) / (len(own) - 1) for own in times.values()),
        both / SECONDS,
        steps / SECONDS,
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--label", default="", help="part of the keys, to compare two commits")
    parser.add_argument("--factors", default="16,32", help="multiples of the paper's load")
    parser.add_argument("--policies", default="ets,slack,overlap")
    parser.add_argument("--targets", default="0.1,0.012", help="TTFT and TPOT in seconds")
    parser.add_argument("--speeds", default="0.5,0.75", help="of a step and of training, each beside the other")
    options: argparse.Namespace = parser.parse_args()
    ttft, tpot = (float(part) for part in options.targets.split(","))
    step_speed, train_speed = (float(part) for part in options.speeds.split(","))
    results = Results.of(
        options,
        "ets_loads.json",
        __file__,
        {"seconds": SECONDS, "targets": (ttft, tpot), "speeds": (step_speed, train_speed)},
        hardware="any: virtual time",
    )
    for factor in map(int, options.factors.split(",")):
        for name in options.policies.split(","):
            found = point(policies(tpot)[name], factor, Slo(ttft=ttft, tpot=tpot), 0, (step_speed, train_speed))
            key = f"ets_loads.x{factor}.{name}" + (f".{options.label}" if options.label else "")
            results.put(f"{key}.finetune", round(found.training), "tok/s", about=asdict(found))


if __name__ == "__main__":
    main()
