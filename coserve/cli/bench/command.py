"""The command `coserve bench`: one option per setting of `workloads.scenario.Scenario`, and options of the run
itself."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coserve.cli.bench.run import Route, Server, ServerKind, run_until_terminated
from coserve.cli.common import DEFAULT_URL, Key, Url
from coserve.cli.failures import FAILED, usage_errors
from coserve.cli.settings_options import SettingsCommand, settings_command
from coserve.core.errors import InvalidRequest, MalformedRow
from coserve.workloads.opening import check_requests, check_save, open_workload, unused
from coserve.workloads.replay import ReplayResult, Rest
from coserve.workloads.report.conditions import Condition, parse_condition
from coserve.workloads.report.files import check_folder, write_report
from coserve.workloads.report.tables import adapter_table, class_table, failure_lines, latency_table, totals_table
from coserve.workloads.scenario import Scenario, given_settings, sections
from coserve.workloads.summary import Summary, summarise
from coserve.workloads.trace import Trace, save_trace


def _bench(
    given: dict[str, object],
    *,
    workload: Annotated[
        Path | None, typer.Option(metavar="PATH", help="TOML file with settings of the workload")
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="PATH", help="save the workload as a trace file")] = None,
    run: Annotated[bool, typer.Option(help="send the workload; --no-run: only --save it")] = True,
    server: Annotated[
        ServerKind,
        typer.Option(metavar="coserve|openai", help="coserve, or any server with /v1/completions, which gets no jobs"),
    ] = ServerKind.COSERVE,
    route: Annotated[
        Route,
        typer.Option(
            metavar="generate|completions", help="on coserve, where prompts are sent: /generate or /v1/completions"
        ),
    ] = Route.GENERATE,
    model: Annotated[
        str | None, typer.Option(help="name of the base on an OpenAI-style server; default: its first model")
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(
            help="put before the adapters' names; default: a random one on coserve, '' elsewhere. With '' a run uses "
            "the adapters that there are"
        ),
    ] = None,
    rest: Annotated[
        Rest, typer.Option(metavar="drain|cancel|leave", help="what becomes of unfinished jobs at the end")
    ] = Rest.CANCEL,
    peak: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="fine-tuning tokens/s alone; default: as measured in --lead")
    ] = None,
    metrics_interval: Annotated[
        float,
        typer.Option(
            min=0, metavar="NUMBER", help="seconds between two looks at /metrics for queue and memory; 0: none"
        ),
    ] = 1.0,
    fail_under: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="exit with status 1 unless this holds, such as 'slo>=0.99' or 'ttft_p99<=250ms'; may be repeated",
        ),
    ] = None,
    report: Annotated[
        Path, typer.Option(metavar="PATH", help="folder for report.json, report.png and report.html")
    ] = Path("bench-report"),
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Send a workload to a running server, each request at its time, and report. By default it is the ETS paper's
    synthetic workload (its table 5.1) and the server is coserve, where the run creates adapters with unique names and
    deletes them and their jobs at the end, also after Ctrl-C. Settings of the workload also come from the TOML file of
    --workload and from --preset.
    """
    if not run and save is None:
        raise typer.BadParameter("--no-run needs --save")
    with usage_errors(), usage_errors(MalformedRow):
        conditions = [parse_condition(text) for text in fail_under or ()]
        check_options(run=run, conditions=bool(conditions), server=server, route=route, model=model, rest=rest)
        settings = given_settings(given, workload)
        trace = open_workload(settings)
        check_settings(settings, given, workload)
        if save is not None:
            check_save(save, settings)
        check_requests(trace, settings)
    if run:
        check_folder(report)
    if save is not None:
        with usage_errors(MalformedRow):
            save_trace(trace, save)
        print(f"saved: {save}")
    if not run:
        return
    where = Server(
        url=url,
        key=_key_for(server, key),
        kind=server,
        route=route,
        model=model,
        prefix=prefix,
        metrics_interval=metrics_interval,
    )
    with usage_errors(MalformedRow):
        result = _run(
            trace, rest, where, lambda found: _print_report(report, found, summarise(found, peak=peak), server)
        )
    summary = summarise(result, peak=peak)
    _print_report(report, result, summary, server)
    held = _all_hold(conditions, summary)
    if not summary.completed:
        errors = ", ".join(f"{code} {times}" for code, times in sorted(summary.errors.items()))
        print(f"coserve: no request was answered: {errors}", file=sys.stderr)
    if not held or not summary.completed:
        raise typer.Exit(FAILED)


def _run(trace: Trace, rest: Rest, server: Server, report: Callable[[ReplayResult], None]) -> ReplayResult:
    """Run the benchmark. If Ctrl-C or SIGTERM interrupts it, call `report` with the results so far, once it has cleaned
    up, and raise `KeyboardInterrupt`."""
    measured: list[ReplayResult] = []
    try:
        return asyncio.run(run_until_terminated(trace, rest, server, measured.append))
    except (KeyboardInterrupt, asyncio.CancelledError):
        if measured and measured[0].samples:
            print("interrupted; the report is of what was answered until then", file=sys.stderr)
            report(measured[0])
        raise KeyboardInterrupt from None


def _key_for(server: ServerKind, key: str | None) -> str | None:
    """Return the API key for a server. COSERVE_API_KEY is sent to coserve only: another server gets `--key`, or
    OPENAI_API_KEY."""
    if server is ServerKind.OPENAI and key == os.environ.get("COSERVE_API_KEY"):
        key = os.environ.get("OPENAI_API_KEY")
    return key or None


def _print_report(folder: Path, run: ReplayResult, summary: Summary, server: str) -> None:
    console = Console()
    console.print(latency_table(summary))
    console.print(totals_table(summary))
    if len(summary.adapters) > 1:
        console.print(adapter_table(summary))
    if len(summary.classes) > 1:
        console.print(class_table(summary))
    for line in failure_lines(summary):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    print("saved:", *write_report(folder, run, summary, server))


def _all_hold(conditions: list[Condition], summary: Summary) -> bool:
    """Print the result of each condition on standard error, and return whether all hold."""
    for condition in conditions:
        value = condition.value(summary)
        found = f"not measured{condition.lacks(summary)}" if value is None else f"{value:.6g}"
        print(f"{condition.text}: {found}, {'met' if condition.holds(summary) else 'NOT met'}", file=sys.stderr)
    return all(condition.holds(summary) for condition in conditions)


class BenchCommand(SettingsCommand):
    """The help of `coserve bench`."""

    settings = Scenario
    groups = staticmethod(sections)


bench = settings_command(_bench, settings=Scenario)


def check_settings(settings: Mapping[str, object], given: Collection[str], file: Path | None) -> None:
    """Check the workload's settings. `given`: names of those from the command line; the others are from `file`.

    Raises `InvalidRequest` for a command-line setting without effect, prints a line for each of the file.
    """
    found = unused(settings)
    _refuse([f"--{name.replace('_', '-')} has no effect: {needs}" for name, needs in found.items() if name in given])
    others = [f"{name} has no effect: {needs}" for name, needs in found.items() if name not in given]
    if others:
        print(f"{file}: {'; '.join(others)}", file=sys.stderr)


def check_options(
    *, run: bool, conditions: bool, server: ServerKind, route: Route, model: str | None, rest: Rest
) -> None:
    """Raise `InvalidRequest` for an option of the run without effect."""
    any_server = server is ServerKind.OPENAI
    idle = {
        "--fail-under has no effect with --no-run": conditions and not run,
        "--route completions has no effect with --server openai": any_server and route is Route.COMPLETIONS,
        f"--rest {rest} has no effect with --server openai, which gets no jobs": any_server and rest is not Rest.CANCEL,
        "--model has no effect: it needs --server openai or --route completions": model is not None
        and not any_server
        and route is Route.GENERATE,
    }
    _refuse([text for text, found in idle.items() if found])


def _refuse(lines: list[str]) -> None:
    if lines:
        raise InvalidRequest("; ".join(lines))
