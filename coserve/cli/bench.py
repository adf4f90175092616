"""`coserve bench`."""

from __future__ import annotations

import asyncio
import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coserve.cli.bench_progress import BenchProgress, CountedTarget, shown
from coserve.cli.common import DEFAULT_URL, Key, Url
from coserve.cli.status_lines import warming_line
from coserve.client import AsyncClient
from coserve.workloads.arrivals import Arrivals, Process
from coserve.workloads.metrics import summarise
from coserve.workloads.popularity import Popularity, Shape
from coserve.workloads.replay import ReplayResult, Rest, replay
from coserve.workloads.report import check_folder, latency_table, totals_table, write_report
from coserve.workloads.scenario import (
    Scenario,
    Trace,
    bundled_prompts,
    bundled_rows,
    load_trace,
    make_trace,
    save_trace,
)
from coserve.workloads.target import NO_RETRIES, DaemonTarget


def bench(
    duration: Annotated[float, typer.Option(help="seconds in which requests arrive")] = 60.0,
    rate: Annotated[float, typer.Option(help="requests a second")] = 10.0,
    process: Annotated[Process, typer.Option(help="how requests arrive")] = Process.CONSTANT,
    finetune_period: Annotated[float, typer.Option(help="seconds between bursts of fine-tuning rows")] = 20.0,
    finetune_rows: Annotated[int, typer.Option(help="most rows of a burst; 0: no fine-tuning")] = 512,
    adapters: Annotated[int, typer.Option(help="adapters that requests and rows are spread over")] = 32,
    rank: Annotated[int, typer.Option(help="rank of the adapters")] = 32,
    popularity: Annotated[Shape, typer.Option(help="how often each adapter is asked for")] = Shape.UNIFORM,
    max_tokens: Annotated[int, typer.Option(help="most new tokens of a request")] = 64,
    seed: Annotated[int, typer.Option(help="the same seed gives the same workload")] = 0,
    trace: Annotated[Path | None, typer.Option(help="replay this trace instead of making one")] = None,
    save: Annotated[Path | None, typer.Option(help="save the trace here")] = None,
    rest: Annotated[Rest, typer.Option(help="what becomes of unfinished jobs at the end")] = Rest.CANCEL,
    report: Annotated[Path, typer.Option(help="folder for report.json and report.png")] = Path("bench-report"),
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Run the ETS paper's synthetic workload (its table 5.1 by default) against a running daemon and report.

    It creates adapters with unique names and deletes them at the end, also after Ctrl-C.
    """
    check_folder(report)
    scenario = Scenario(
        seed=seed,
        duration=duration,
        arrivals=Arrivals(process=process, rate=rate),
        finetune_period=finetune_period,
        finetune_rows=finetune_rows,
        adapters=adapters,
        rank=rank,
        popularity=Popularity(shape=popularity),
        min_new_tokens=min(16, max_tokens),
        max_new_tokens=max_tokens,
    )
    made = make_trace(scenario, bundled_prompts(), bundled_rows()) if trace is None else load_trace(trace)
    if save is not None:
        save_trace(made, save)
    run = asyncio.run(run_bench(made, rest, url, key))
    _print_report(report, run)


async def run_bench(trace: Trace, rest: Rest, url: str, key: str | None) -> ReplayResult:
    """Replay a trace on the daemon at `url`; its adapters are deleted at the end, unless `rest` leaves everything."""
    progress = BenchProgress(trace)
    async with AsyncClient(url, api_key=key or None, retry=NO_RETRIES) as client:
        target = CountedTarget(client, trace.scenario, prefix=f"bench-{secrets.token_hex(4)}-")
        target.progress = progress
        health = await client.health()  # fails before anything is created if no daemon answers
        if health.warming is not None:
            print(f"the daemon is {warming_line(health.warming)}: some requests are slower until then", file=sys.stderr)
        try:
            async with shown(progress):
                await target.prepare()
                progress.begin()
                return await replay(trace, target, rest=rest, observe=progress.observe)
        finally:
            if rest is not Rest.LEAVE:
                await _clean_up(target)


async def _clean_up(target: DaemonTarget) -> None:
    print("deleting the adapters of this run", file=sys.stderr)
    kept = await target.clean_up()
    if kept:
        print(f"could not delete {', '.join(kept)}: coserve adapters delete NAME", file=sys.stderr)


def _print_report(folder: Path, run: ReplayResult) -> None:
    console, summary = Console(), summarise(run)
    console.print(latency_table(summary))
    console.print(totals_table(summary))
    print("saved:", *write_report(folder, run, summary))
