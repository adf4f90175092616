"""Latencies of an adapter's requests beside a document's job, by its phase, and of the same load alone.

    python -m benchmarks.documents.beside --out R                         (one GPU)
    python -m benchmarks.documents.beside --tiny --out /tmp/tried         (a CPU; minutes)

The Llama-3.1-8B shape with random weights, the daemon's own policy and targets (on a GPU 1 s to the first token and
50 ms a token), Poisson requests to one LoRA. `documents.beside.PHASE`: share of the requests due in this phase that
kept both targets, with TTFT and TPOT; PHASE is `alone`, `questions`, `answers`, `training` or `evaluation`. As in
`learned.py --cost`, one job asks and is cancelled then, since random weights ask hardly two different questions;
another one answers as many questions of the document's words, and learns. `--tiny`: the bundled base.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.options import make_parser
from benchmarks.common.results import Results, summarize
from benchmarks.documents.arms import daemon
from benchmarks.documents.cost import bundled_tokens, phase_times, questions_of
from benchmarks.documents.learning import PHASES
from benchmarks.serving.http_case import FULL, model_folder
from coserve.client import AsyncClient
from coserve.config import Config
from coserve.core.schemas.jobs import JobEvent
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.workloads.arrivals import Process
from coserve.workloads.distributions import Lengths
from coserve.workloads.metrics import Limits, attainment, spread, tpot, ttft
from coserve.workloads.replay import JobSample, Rest, Sample, replay
from coserve.workloads.scenario import Finetuning, Scenario
from coserve.workloads.synthesis import make_trace
from coserve.workloads.target import NO_RETRIES, DaemonTarget

FILE = "documents.json"
LONGEST = 3600.0
"""Seconds of a load, of which those until its end are sent."""
PATIENCE = 60.0
"""Seconds after which a request is given up."""


class Window(NamedTuple):
    """A phase of a job, in seconds on the wall clock."""

    phase: str
    begin: float
    end: float


def windows(events: Iterable[JobEvent], ended: float) -> list[Window]:
    """Return the phases of a document's job that have requests or training, until it `ended`."""
    begins = [(at, phase) for phase, at in phase_times(events, 0.0).items() if phase in PHASES]
    ordered = sorted(begins)
    ends = [*(at for at, _ in ordered[1:]), ended]
    return [Window(phase, at, end) for (at, phase), end in zip(ordered, ends, strict=True)]


def due_in(samples: Sequence[Sample], began: float, own: Sequence[Window]) -> list[Sample]:
    """Return the samples that were due in one of the windows. `began`: the load's begin on the wall clock."""
    return [each for each in samples if any(own.begin <= began + each.due < own.end for own in own)]


def measures(samples: Sequence[Sample], limits: Limits) -> tuple[float, dict[str, object]]:
    """Return the share within the limits, and percentiles of TTFT and TPOT in milliseconds."""
    about: dict[str, object] = {"requests": len(samples), "failed": sum(each.error is not None for each in samples)}
    answered = [each for each in samples if each.error is None]
    for name, of in (("ttft_ms", ttft), ("tpot_ms", tpot)):
        found = spread([value for each in answered if (value := of(each)) is not None])
        about[name] = found and {"p50": round(1e3 * found.p50, 2), "p99": round(1e3 * found.p99, 2)}
    return round(attainment(samples, limits), 4), about


@contextlib.asynccontextmanager
async def requests(client: AsyncClient, scenario: Scenario) -> AsyncIterator[list[Sample]]:
    """Send the scenario's requests until this is left; yields the answers, which grow."""
    found = list[Sample]()

    def observe(sample: Sample | JobSample) -> None:
        assert isinstance(sample, Sample)
        found.append(sample)

    trace, target = make_trace(scenario, [], []), DaemonTarget(client, scenario)
    sending = asyncio.create_task(replay(trace, target, rest=Rest.LEAVE, request_timeout=PATIENCE, observe=observe))
    try:
        yield found
    finally:
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending


async def learned(client: AsyncClient, options: argparse.Namespace, tokenizer: Tokenizer, name: str) -> list[Window]:
    """Let one job ask about a document, and another answer questions about it and learn it; return their phases."""
    tokens = bundled_tokens(tokenizer, options.tokens)
    text, sizes = tokenizer.decode(tokens), {"chunk_tokens": options.chunk_tokens}
    asking = await client.learn(f"{name}-asks", text, questions_per_chunk=options.per_chunk, **sizes)
    seen = list[JobEvent]()
    async for event in asking.events():
        seen.append(event)
        if event.document is not None and event.document.phase == "answers":
            break
    found = windows(seen[:-1], seen[-1].created_at)
    assert seen[-1].document is not None, "the job ended while it asked"
    await asking.cancel()
    job = await client.learn(
        name,
        text,
        questions=questions_of(tokenizer, tokens, options.per_chunk * seen[-1].document.chunks),
        answer_tokens=options.answer_tokens,
        publish="always",
        training={"steps": options.steps} if options.steps else {},
        **sizes,
    )
    info = await job.wait(progress=False)
    assert info.finished_at is not None
    return [*found, *windows([event async for event in job.events()], info.finished_at)]


async def measure(
    url: str, options: argparse.Namespace, tokenizer: Tokenizer, limits: Limits
) -> dict[str, tuple[list[Sample], float]]:
    """Return the samples of the load alone and of each phase, and its seconds."""
    load = Scenario(
        duration=LONGEST,
        process=Process.POISSON,
        rate=options.rate,
        adapters=1,
        rank=(16,),
        prompt_lengths=Lengths.UNIFORM,
        min_prompt_tokens=options.prompt // 2,
        max_prompt_tokens=options.prompt,
        min_tokens=options.output // 2,
        max_tokens=options.output,
        finetune=Finetuning.OFF,
    )
    async with AsyncClient(url, retry=NO_RETRIES, read_timeout=LONGEST) as client:
        await client.wait_ready()
        await DaemonTarget(client, load).prepare()
        async with requests(client, replace(load, seed=1)):  # what is missing is compiled
            await learned(client, options, tokenizer, "warm")
        async with requests(client, load) as samples:
            await asyncio.sleep(options.alone)
        found = {"alone": (samples, options.alone)}
        async with requests(client, replace(load, seed=2)) as samples:  # prompts that the prefix cache does not have
            began = time.time()
            phases = await learned(client, options, tokenizer, "measured")
    for phase in PHASES:
        own = [each for each in phases if each.phase == phase]
        found[phase] = due_in(samples, began, own), sum(each.end - each.begin for each in own)
    return found


def main() -> None:
    parser = make_parser(__doc__, tiny="the bundled base and a small document, on any machine")
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second")
    parser.add_argument("--prompt", type=int, default=512, help="most tokens of a prompt, at least half of them")
    parser.add_argument("--output", type=int, default=128, help="most tokens of an answer, at least half of them")
    parser.add_argument("--alone", type=float, default=40.0, help="seconds without a job")
    parser.add_argument("--tokens", type=int, default=4096, help="of the document")
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--per-chunk", type=int, default=24, help="questions of each chunk")
    parser.add_argument("--answer-tokens", type=int, default=48)
    parser.add_argument("--steps", type=int, default=0, help="of the job; 0: what the daemon chooses")
    parser.add_argument("--serve", default="", help="further options of coserve serve, in one text")
    options = parser.parse_args()
    results = Results.of(
        options, FILE, __file__, {k: v for k, v in vars(options).items() if k not in ("out", "commit")}
    )
    with tempfile.TemporaryDirectory(prefix="beside-") as root:
        folder = Path(root)
        model = "bundled" if options.tiny else str(model_folder(folder / "model", FULL))
        serving = ["--model", model] if options.tiny else ["--model", model, "--load-format", "dummy"]
        goals = Config().targets(device="cpu" if options.tiny else "cuda")
        limits = Limits(ttft=goals[0], tpot=goals[1])
        with daemon([*serving, *options.serve.split()], folder) as url:
            found = asyncio.run(measure(url, options, Tokenizer.load(model), limits))
    load = {"rate": options.rate, "limits": {"ttft": limits.ttft, "tpot": limits.tpot}}
    for phase, (samples, seconds) in found.items():
        if not samples:
            continue
        share, about = measures(samples, limits)
        print(phase, about, flush=True)
        results.put(f"documents.beside.{phase}", share, "fraction", about=about | load | {"seconds": round(seconds, 1)})
    summarize(FILE, options.out)


if __name__ == "__main__":
    main()
