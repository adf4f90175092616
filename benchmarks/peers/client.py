"""The prompts of a trace to `/v1/completions` from several processes: one cannot read the chunks of a hundred answers
in time.

Each process sends every n-th prompt, from the same moment on. Its plan comes on standard input and its result goes to
standard output:

    python -m benchmarks.peers.client < plan.json
"""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.peers.processes import module
from coserve.workloads.openai_target import OpenAITarget
from coserve.workloads.replay import ReplayResult, Rest, replay
from coserve.workloads.scenario import Scenario
from coserve.workloads.trace import PromptArrival, Trace, load_trace

PATIENCE = 90.0
"""Seconds after which a request is given up."""
WARM_TOKENS, WARM_OUTPUT = 64, 16


class Plan(msgspec.Struct, frozen=True):
    """Prompts number `part`, `part + parts`, ... of `trace`. `targets`: further fields of each request, such as
    `slo_ttft`."""

    url: str
    model: str
    trace: str
    part: int
    parts: int
    targets: dict[str, float] = {}


class _Target(OpenAITarget):
    """Its requests carry latency targets."""

    def __init__(self, plan: Plan, temperature: float) -> None:
        super().__init__(plan.url, model=plan.model, temperature=temperature)
        self._targets = plan.targets

    def body(self, arrival: PromptArrival) -> dict[str, object]:
        return super().body(arrival) | self._targets


async def send(plan: Plan) -> ReplayResult:
    """Wait for the time of the start on standard input, then send this part."""
    trace = load_trace(Path(plan.trace))
    own = [prompt for prompt in trace.prompts if prompt.index % plan.parts == plan.part]
    async with _Target(plan, trace.scenario.temperature) as target:
        print(flush=True)  # ready
        start = float(sys.stdin.readline())
        await asyncio.sleep(start - time.monotonic())
        return await replay(
            Trace(trace.scenario, own),
            target,
            rest=Rest.LEAVE,
            request_timeout=PATIENCE,
            probe=target.probe if plan.part == 0 else None,
        )


async def replay_prompts(
    url: str,
    model: str,
    trace: Path,
    parts: int,
    targets: dict[str, float],
    begins: Callable[[float], None] | None = None,
) -> tuple[ReplayResult, float]:
    """The prompts of a trace on a server, and when they began on the monotonic clock, which `begins` is told before.
    Exits if one of the processes fails."""
    processes = [
        await asyncio.create_subprocess_exec(*module("benchmarks.peers.client"), stdin=PIPE, stdout=PIPE, limit=1 << 30)
        for _ in range(parts)
    ]
    for part, process in enumerate(processes):
        plan = Plan(url, model, str(trace), part, parts, targets)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(plan) + b"\n")
    for process in processes:
        assert process.stdout is not None
        if not await process.stdout.readline():
            raise SystemExit("a client's process ended")
    start = time.monotonic() + 0.2
    if begins is not None:
        begins(start)
    found = await asyncio.gather(*(process.communicate(f"{start}\n".encode()) for process in processes))
    if any(process.returncode for process in processes):
        raise SystemExit("a client's process failed")
    runs = [msgspec.json.decode(content, type=ReplayResult) for content, _ in found]
    return merged(runs), start


async def base_name(url: str) -> str:
    async with OpenAITarget(url, model="") as target:
        return (await target.models())[0]


async def warm_up(url: str, model: str, scenario: Scenario) -> None:
    """Two rounds of a request for the base and each adapter at a time: adapters are loaded, kernels and graphs are
    there.

    Exits if one of them fails.
    """
    names = [None, *scenario.adapter_names]
    arrivals = [
        PromptArrival(
            at=0.0, index=i, adapter=name, prompt=tuple(range(300, 300 + WARM_TOKENS)), max_tokens=WARM_OUTPUT, seed=i
        )
        for i, name in enumerate(names)
    ]
    async with OpenAITarget(url, model=model) as target:
        for _ in range(2):
            run = await replay(Trace(scenario, arrivals), target, rest=Rest.LEAVE)
            if failed := {sample.error for sample in run.samples} - {None}:
                raise SystemExit(f"the warm-up failed: {failed}")


def merged(runs: list[ReplayResult]) -> ReplayResult:
    """One run of its parts."""
    samples = sorted((sample for run in runs for sample in run.samples), key=lambda sample: sample.index)
    return msgspec.structs.replace(runs[0], samples=tuple(samples), duration=max(run.duration for run in runs))


def main() -> None:
    plan = msgspec.json.decode(sys.stdin.readline(), type=Plan)
    result = asyncio.run(send(plan))
    sys.stdout.buffer.write(msgspec.json.encode(result))


if __name__ == "__main__":
    main()
