"""Runs `coserve demo`: the whole daemon in two minutes, on its bundled base.

Starts a daemon in a folder of its own, streams from the base, fine-tunes two adapters of different LoRA rank under
load, shows what each adapter changed, and reports the latencies of the requests.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from coserve.client import AsyncClient, AsyncJobHandle
from coserve.core.errors import StartupError
from coserve.core.processes import signal_child
from coserve.core.schemas.generation import GenerateResponse
from coserve.core.schemas.jobs import JobEvent
from coserve.core.training.settings import Schedule, TrainingSettings
from coserve.core.types import LoraRequest
from coserve.data.pretrained.source import BUNDLED
from coserve.workloads.bundled import bundled_prompts
from coserve.workloads.metrics import Limits
from coserve.workloads.replay import JobSample, ReplayResult, Sample, replay
from coserve.workloads.report.files import write_report
from coserve.workloads.report.tables import latency_table, totals_table
from coserve.workloads.scenario import Scenario
from coserve.workloads.summary import Summary, summarise
from coserve.workloads.target import DaemonTarget
from coserve.workloads.trace import FinetuneArrival, PromptArrival, Trace

RANKS = {"pirate": 8, "recipes": 16}
PROMPT = "Today we"
TRAINING = TrainingSettings(
    epochs=15, batch_tokens=1024, learning_rate=6e-3, warmup_steps=4, schedule=Schedule.LINEAR, checkpoint_steps=25
)
REQUESTS_PER_SECOND = 1.5
SECONDS = 50.0
BURST = 8
"""Simultaneous requests to the base and to each adapter, once both exist."""
STARTING = "a daemon starts on the base {}; the first time Python compiles PyTorch and transformers, a minute or more"
NEXT = """next, in this terminal and in a second one (after . .venv/bin/activate):
  coserve serve
  coserve finetune pirate coserve/assets/corpora/pirate.jsonl --rank 8
  coserve generate "Today we" --adapter pirate --max-tokens 40
README.md goes on from there; docs/guide/data.md says what your own rows look like"""
LIMITS = Limits(ttft=2.0, tpot=0.2)


def _refusal(log: Path) -> StartupError:
    """Return the daemon's last log line, which has the reason, as an error."""
    last = log.read_text().strip().rpartition("\n")[2]
    return StartupError(f"the daemon did not start: {last.removeprefix('coserve: ')}")


@asynccontextmanager
async def daemon(folder: Path, log: Path, console: Console, base: str = BUNDLED) -> AsyncIterator[str]:
    """Run a daemon with this base on a free port and show the progress of its start and its output; yield its URL."""
    options = ("--model", base, "--port", "0", "--data-dir", str(folder))
    command = (sys.executable, "-P", "-m", "coserve", "serve", *options)
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=stderr)
    assert process.stdout is not None
    try:
        line = STARTING.format(base)
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        with Progress(*columns, console=console) as start:
            shown = start.add_task(line, total=None)
            while "listens on" not in line:
                line = (await process.stdout.readline()).decode().strip()
                if not line:
                    raise _refusal(log)
                start.update(shown, description=line)
        yield line.split()[-1]
    finally:
        signal_child(process, signal.SIGTERM)
        await process.wait()


def _rows(name: str) -> tuple[dict[str, Any], ...]:
    text = (resources.files("coserve") / "assets" / "corpora" / f"{name}.jsonl").read_text()
    return tuple(json.loads(line) for line in text.splitlines())


def _trace() -> Trace:
    """Return the workload: both jobs at the start, and requests at a constant rate."""
    scenario = Scenario(duration=SECONDS, adapters=len(RANKS), slo_ttft=LIMITS.ttft, slo_tpot=LIMITS.tpot)
    jobs = [FinetuneArrival(at=0.0, index=i, adapter=name, rows=_rows(name)) for i, name in enumerate(RANKS)]
    prompts = bundled_prompts()
    requests = [
        PromptArrival(
            at=i / REQUESTS_PER_SECOND,
            index=i,
            adapter=None,
            prompt=prompts[i % len(prompts)],
            max_tokens=24 + 8 * (i % 3),
            seed=i,
        )
        for i in range(int(SECONDS * REQUESTS_PER_SECOND))
    ]
    return Trace(scenario=scenario, arrivals=(*jobs, *requests))


class _ShownTarget(DaemonTarget):
    """A target whose jobs create new adapters, each with its LoRA rank, and update progress bars."""

    def __init__(self, client: AsyncClient, scenario: Scenario, bars: Progress) -> None:
        super().__init__(client, scenario)
        self._client, self._bars = client, bars
        self._tasks: dict[str, tuple[TaskID, list[float]]] = {}

    async def start(self, arrival: FinetuneArrival) -> AsyncJobHandle:
        rank = RANKS[arrival.adapter]
        job = await self._client.finetune(
            arrival.adapter, arrival.rows, lora=LoraRequest(r=rank, alpha=32), training=TRAINING
        )
        bar = self._bars.add_task(f"{arrival.adapter} (rank {rank})", total=job.info.total_steps, note="queued")
        self._tasks[job.id] = (bar, [])
        return job

    def seen(self, event: JobEvent) -> None:
        if event.metrics is None:
            return
        bar, losses = self._tasks[event.job]
        losses.append(event.metrics.loss)
        note = f"loss {losses[0]:.2f} -> {losses[-1]:.2f}"
        self._bars.update(bar, completed=event.metrics.step, total=event.metrics.total_steps, note=note)


async def _continuation(client: AsyncClient, adapter: str | None) -> str:
    answer = await client.generate(PROMPT, adapter=adapter, max_tokens=48, temperature=0.3, top_k=40, seed=7)
    return PROMPT + answer.choices[0].text


async def _stream(client: AsyncClient, console: Console, prompt: str) -> None:
    console.print(prompt, style="bold", end="")
    async with aclosing(client.stream(prompt, max_tokens=48, temperature=0.6, seed=3)) as chunks:
        async for chunk in chunks:
            console.print(chunk.text, end="", markup=False, highlight=False)
    console.print("\n")


async def _train_and_serve(client: AsyncClient, console: Console) -> ReplayResult:
    columns = (
        TextColumn("{task.description:>18}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        served = bars.add_task("requests", total=int(SECONDS * REQUESTS_PER_SECOND), note="")

        def observe(sample: Sample | JobSample) -> None:
            if isinstance(sample, Sample):
                bars.update(served, advance=1, note=f"last one took {sample.finished - sample.due:.2f} s")

        trace = _trace()
        return await replay(trace, _ShownTarget(client, trace.scenario, bars), observe=observe)


def _comparison(before: str, after: dict[str, str]) -> Table:
    table = Table(title=f"One prompt, before and after: {PROMPT!r}", title_justify="left", show_lines=True)
    table.add_column("served by")
    table.add_column("continuation", overflow="fold")
    table.add_row("the base", before)
    for name, text in after.items():
        table.add_row(f"{name} (rank {RANKS[name]})", text)
    return table


async def _burst(client: AsyncClient, console: Console) -> None:
    """Query the base and both adapters simultaneously."""
    loop = asyncio.get_running_loop()

    async def seconds(calls: list[Coroutine[Any, Any, GenerateResponse]]) -> float:
        began = loop.time()
        await asyncio.gather(*calls)
        return loop.time() - began

    def call(adapter: str | None) -> Coroutine[Any, Any, GenerateResponse]:
        return client.generate(PROMPT, adapter=adapter, max_tokens=32, temperature=0, ignore_eos=True)

    everyone = [None, *RANKS]
    alone = await seconds([call(None)])
    together = await seconds([call(adapter) for adapter in everyone * BURST])
    names = ", ".join(f"{BURST} for {name or 'the base'}" for name in everyone)
    console.print(
        f"{BURST * len(everyone)} requests at once ({names}), all in one batch: {together:.2f} s; one alone takes "
        f"{alone:.2f} s",
        highlight=False,
    )


async def _show(client: AsyncClient, console: Console) -> ReplayResult:
    console.rule("1. The bundled base streams")
    for prompt in ("The with statement", "Return a list of"):
        await _stream(client, console, prompt)
    before = await _continuation(client, None)
    console.rule("2. Two adapters are fine-tuned over HTTP while requests keep coming")
    run = await _train_and_serve(client, console)
    console.rule("3. What the adapters changed; they serve from the moment their jobs end")
    console.print(_comparison(before, {name: await _continuation(client, name) for name in RANKS}))
    await _burst(client, console)
    return run


def _report(console: Console, run: ReplayResult, summary: Summary, folder: Path) -> None:
    console.rule("4. What the requests saw meanwhile")
    console.print(latency_table(summary))
    console.print(totals_table(summary))
    paths = write_report(folder, run, summary)
    console.print("saved: " + ", ".join(str(path) for path in paths), highlight=False)


async def demo(report: Path) -> None:
    """Run the demo and write `report.json`, `report.png` and `daemon.log` to the folder `report`, which exists.

    Raises `StartupError` if the daemon does not start, or if any job or request of the demo failed.
    """
    console = Console()
    with tempfile.TemporaryDirectory(prefix="coserve-demo-") as folder:
        async with daemon(Path(folder), report / "daemon.log", console) as url, AsyncClient(url) as client:
            run = await _show(client, console)
    summary = summarise(run)
    _report(console, run, summary, report)
    if summary.errors or summary.job_errors or summary.jobs_succeeded != len(RANKS):
        raise StartupError(f"the demo went wrong: {summary.errors or summary.job_errors}")
    console.print(NEXT, markup=False, highlight=False)
