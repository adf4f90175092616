"""Runs a workload against a server, and cleans up after it."""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from coserve.cli.bench.progress import BenchProgress, shown
from coserve.client import AsyncClient
from coserve.client.transport import most_connections
from coserve.core.errors import InvalidRequest
from coserve.core.health import starting_line
from coserve.core.processes import allow_more_files
from coserve.workloads.openai_target import OpenAITarget
from coserve.workloads.replay import ReplayResult, Rest, replay
from coserve.workloads.target import NO_RETRIES, DaemonTarget
from coserve.workloads.trace import PromptArrival, Repeatable, Totals, Trace, count


class ServerKind(StrEnum):
    COSERVE = "coserve"
    OPENAI = "openai"
    """Any server with `/v1/completions`; it gets the prompts but no jobs."""


class Route(StrEnum):
    GENERATE = "generate"
    COMPLETIONS = "completions"
    """Use `/v1/completions`, as on any OpenAI-style server."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """The server that gets a workload. `model`: the base's name (None: the first of `/v1/models`); `prefix`: put before
    the adapters' names (None: a random one on coserve, so that the run has its own adapters; none elsewhere)."""

    url: str
    key: str | None = None
    kind: ServerKind = ServerKind.COSERVE
    route: Route = Route.GENERATE
    model: str | None = None
    prefix: str | None = None
    metrics_interval: float = 1.0
    """Seconds between two reads of `/metrics`; 0: never."""


OnInterrupt = Callable[[ReplayResult], None]
"""Called with the results so far of an interrupted run, before it cleans up."""


async def run_until_terminated(
    trace: Trace, rest: Rest, server: Server, on_interrupt: OnInterrupt = lambda _: None
) -> ReplayResult:
    """Run `run_bench`; SIGTERM cancels it like Ctrl-C, so that it cleans up. Another SIGTERM ends the clean-up too."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await run_bench(trace, rest, server, on_interrupt)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def run_bench(
    trace: Trace, rest: Rest, server: Server, on_interrupt: OnInterrupt = lambda _: None
) -> ReplayResult:
    """Replay a trace, then delete the adapters that were created for it and their jobs, unless `rest` leaves
    everything.

    Raises what reading the trace raises, before anything is sent.
    """
    totals = count(trace)
    _tell_of_few_files(totals)
    if server.kind is ServerKind.OPENAI:
        return await _on_any_server(trace, totals, server, on_interrupt)
    with _plain_warnings():
        return await _on_coserve(trace, totals, rest, server, on_interrupt)


def _tell_of_few_files(totals: Totals) -> None:
    """Warn if there may be too few files: each simultaneous request needs a connection."""
    files, most = allow_more_files(), most_connections()
    if most and totals.prompts > most:
        print(
            f"this process may open {files} files (ulimit -Hn): of more than {most} requests at a time some may wait "
            "in it, or fail",
            file=sys.stderr,
        )


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print the SDK's first warning, about truncated rows, as a line of text; other jobs' warnings are alike and
    suppressed."""
    said, plain = False, warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:  # noqa: ANN401
        nonlocal said
        if category is not UserWarning:
            plain(message, category, *where, **more)
        elif not said:
            said = True
            print(f"fine-tuning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield


async def _on_any_server(trace: Trace, totals: Totals, server: Server, on_interrupt: OnInterrupt) -> ReplayResult:
    if totals.jobs:
        print(f"{totals.jobs} fine-tuning jobs of the workload are not sent: only coserve has them", file=sys.stderr)
    only_prompts = Repeatable(lambda: (arrival for arrival in trace.arrivals if isinstance(arrival, PromptArrival)))
    async with _completions(trace, server, server.prefix or "", server.model or "") as target:
        models = await target.models()
        if server.model is None:
            if not models:
                raise InvalidRequest("expected the base's name: the server lists no models", field="model")
            target.model = models[0]
        if unlisted := sorted({target.served_name(name) for name in totals.adapters} - set(models)):
            print(f"the server lists no model called {', '.join(unlisted)[:200]}", file=sys.stderr)
        progress = BenchProgress(trace.scenario, totals.prompts)
        async with shown(progress):
            prompts = Trace(trace.scenario, only_prompts)
            return await _replay(prompts, target, Rest.LEAVE, server, progress, on_interrupt)


async def _on_coserve(
    trace: Trace, totals: Totals, rest: Rest, server: Server, on_interrupt: OnInterrupt
) -> ReplayResult:
    prefix = f"bench-{secrets.token_hex(4)}-" if server.prefix is None else server.prefix
    async with AsyncClient(server.url, api_key=server.key, retry=NO_RETRIES) as client:
        health = await client.health()  # fails before anything is created if no daemon answers
        if health.status == "starting":
            print(starting_line(health.warming), file=sys.stderr)
        completions = None
        if server.route is Route.COMPLETIONS:
            model = server.model or (health.base.name if health.base is not None else "")
            completions = _completions(trace, server, prefix, model)
        target = DaemonTarget(client, trace.scenario, prefix=prefix, completions=completions)
        progress = BenchProgress(trace.scenario, totals.prompts)
        try:
            # Close the connections of `completions` before the clean-up opens others.
            async with completions or nullcontext(), shown(progress):
                await target.prepare(totals.adapters)
                return await _replay(trace, target, rest, server, progress, on_interrupt)
        finally:
            if rest is not Rest.LEAVE:
                await clean_up(target)


def _completions(trace: Trace, server: Server, prefix: str, model: str) -> OpenAITarget:
    return OpenAITarget(server.url, model=model, key=server.key, temperature=trace.scenario.temperature, prefix=prefix)


async def _replay(
    trace: Trace,
    target: DaemonTarget | OpenAITarget,
    rest: Rest,
    server: Server,
    progress: BenchProgress,
    on_interrupt: OnInterrupt,
) -> ReplayResult:
    progress.begin()
    return await replay(
        trace,
        target,
        rest=rest,
        observe=progress.observe,
        progress=progress.moved,
        probe=target.probe if server.metrics_interval > 0 else None,
        probe_interval=server.metrics_interval,
        on_interrupt=on_interrupt,
    )


async def clean_up(target: DaemonTarget) -> None:
    print("deleting the adapters and jobs of this run", file=sys.stderr)
    kept = target.made
    try:
        kept = await target.clean_up()
    finally:  # also after another Ctrl-C
        if kept:
            print(f"could not delete {', '.join(kept)}: coserve adapters delete NAME", file=sys.stderr)
