"""Writes the files of a report: JSON, a plot, and one self-contained HTML page with its pictures and styles inline."""

from __future__ import annotations

import base64
import dataclasses
import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from jinja2 import Environment

from coserve.core.errors import InvalidRequest
from coserve.core.types import Wire
from coserve.workloads.metrics import e2e, ttft
from coserve.workloads.replay import ReplayResult
from coserve.workloads.report import tables
from coserve.workloads.scenario import Scenario
from coserve.workloads.summary import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Tables = Mapping[str, Sequence[Sequence[str]]]


class Report(Wire, frozen=True):
    """The content of the JSON file. `server`: the server that was measured."""

    summary: Summary
    run: ReplayResult
    server: str = "coserve"


def check_folder(folder: Path) -> None:
    """Create the folder of a report. Raises `InvalidRequest` if no file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidRequest(f"cannot write into the folder {str(folder)!r}: {reason}", field="report") from error


def write_report(folder: Path, run: ReplayResult, summary: Summary, server: str = "coserve") -> list[Path]:
    """Write `report.json`, `report.png` and `report.html` to `folder`, creating it if needed, and return their
    paths."""
    folder.mkdir(parents=True, exist_ok=True)
    json, plot, html = (folder / f"report.{kind}" for kind in ("json", "png", "html"))
    content = msgspec.json.encode(Report(summary=summary, run=run, server=server))
    json.write_bytes(msgspec.json.format(content, indent=1))
    picture = plot_png(run, summary)
    plot.write_bytes(picture)
    shown: dict[str, list[tuple[str, ...]]] = {
        "Latency of the requests": [tables.LATENCY_HEADER, *tables.latency_rows(summary)],
        "Totals": list(tables.totals_rows(summary)),
        "Classes": [tables.CLASS_HEADER, *tables.class_rows(summary)] if len(summary.classes) > 1 else [],
        "Failures": [tables.FAILURE_HEADER, *failures] if (failures := list(tables.failure_rows(summary))) else [],
        "Adapters": [tables.ADAPTER_HEADER, *tables.adapter_rows(summary)],
    }
    html.write_text(page(run, server, shown, picture), encoding="utf-8")
    return [json, plot, html]


def page(run: ReplayResult, server: str, shown: Tables, picture: bytes) -> str:
    """Return the HTML. `shown`: rows of cells by title; in tables of more than two columns the first row is the
    header."""
    text = resources.files("coserve").joinpath("assets/report.html").read_text(encoding="utf-8")
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)
    return template.render(
        server=server,
        interrupted=run.interrupted,
        tables={title: rows for title, rows in shown.items() if rows},
        picture=base64.b64encode(picture).decode(),
        settings=_changed(run.scenario),
    )


def _changed(scenario: Scenario) -> dict[str, str]:
    """Return the settings that differ from the defaults."""
    fields = dataclasses.fields(Scenario)
    values = {f.name: getattr(scenario, f.name) for f in fields if getattr(scenario, f.name) != f.default}
    return {
        name: ", ".join(map(str, value)) if isinstance(value, tuple) else str(value) for name, value in values.items()
    }


INK = {"ttft": "#2a6f97", "e2e": "#bc4b51", "train": "#5b8e7d"}
COLUMNS = 3
"""Panels of a row."""
MOST_NAMES = 5
"""Maximum adapter names that fit side by side under a panel."""
Panel = Callable[["Axes", ReplayResult, Summary], None]


def plot_png(run: ReplayResult, summary: Summary) -> bytes:
    """Plot each request's latency by arrival, the latency distribution against the limits, tokens trained, adapters,
    queue and memory over time. Panels without data are left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [_by_arrival, _distribution, _training]
    panels += [_adapters] if len(summary.adapters) > 1 else []
    panels += [_queue, _memory] if run.snapshots else []
    rows = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(13, 3.8 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for number, draw in enumerate(panels, 1):
        axes = figure.add_subplot(rows, COLUMNS, number)
        draw(axes, run, summary)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    content = io.BytesIO()
    figure.savefig(content, dpi=120)
    return content.getvalue()


def _by_arrival(axes: Axes, run: ReplayResult, summary: Summary) -> None:
    good = [sample for sample in run.samples if sample.error is None]
    failed = [sample.due for sample in run.samples if sample.error is not None]
    due = [sample.due for sample in good]
    axes.plot(due, [e2e(sample) for sample in good], ".", color=INK["e2e"], label="E2E", markersize=4)
    first = [(sample.due, value) for sample in good if (value := ttft(sample)) is not None]
    axes.plot(
        [at for at, _ in first], [value for _, value in first], ".", color=INK["ttft"], label="TTFT", markersize=4
    )
    if failed:
        axes.plot(failed, [0.0] * len(failed), "x", color="black", label="failed", markersize=5)
    axes.set(title="Latency by arrival", xlabel="arrival (s)", ylabel="seconds")
    axes.set_ylim(bottom=0)
    if run.samples:
        axes.legend(frameon=False)


def _distribution(axes: Axes, run: ReplayResult, summary: Summary) -> None:
    """Draw the cumulative distribution of E2E and TTFT over all requests."""
    good = [sample for sample in run.samples if sample.error is None]
    for name, values in (("ttft", [ttft(sample) for sample in good]), ("e2e", [e2e(sample) for sample in good])):
        ordered = sorted(value for value in values if value is not None)
        shares = [(i + 1) / len(run.samples) for i in range(len(ordered))]
        if ordered:
            axes.step(ordered, shares, where="post", color=INK[name], label=name.upper())
    for slo in summary.slo_attainment:
        axes.axvline(float(slo), color="grey", linestyle=":", linewidth=1)
        axes.annotate(f"{slo} s", (float(slo), 0.02), color="grey", fontsize=8, rotation=90, ha="right")
    axes.set(title="Share of requests within", xlabel="seconds", ylim=(0, 1.02), xscale="log")
    if good:
        axes.legend(frameon=False, loc="center right")


def _training(axes: Axes, run: ReplayResult, summary: Summary) -> None:
    steps = sorted(step for job in run.jobs for step in job.trained)
    times = [0.0, *(at for at, _ in steps), max(run.duration, *(at for at, _ in steps), 0.0)]
    totals = [0, *accumulate(tokens for _, tokens in steps)]
    axes.step(times, [*totals, totals[-1]], where="post", color=INK["train"])
    if run.scenario.lead:
        axes.axvspan(*run.scenario.window, color="grey", alpha=0.08)
    axes.set(title="Tokens fine-tuned", xlabel="time (s)", ylabel="tokens")
    axes.set_ylim(bottom=0)


def _adapters(axes: Axes, run: ReplayResult, summary: Summary) -> None:
    values = [each.attainment for each in summary.adapters]
    axes.bar(range(len(values)), values, width=0.9, color=INK["ttft"])
    if len(values) <= MOST_NAMES:
        axes.set_xticks(range(len(values)), [each.adapter or "the base" for each in summary.adapters])
    axes.set(title="Attainment by adapter", xlabel="adapters, the worst first", ylabel="share", ylim=(0, 1.02))


def _queue(axes: Axes, run: ReplayResult, summary: Summary) -> None:
    for name, ink in (("running", INK["ttft"]), ("waiting", INK["e2e"])):
        points = [(each.at, value) for each in run.snapshots if (value := getattr(each, name)) is not None]
        if points:
            axes.plot([at for at, _ in points], [value for _, value in points], color=ink, label=name)
    axes.set(title="Requests in the server", xlabel="time (s)")
    axes.set_ylim(bottom=0)
    if axes.lines:
        axes.legend(frameon=False)


def _memory(axes: Axes, run: ReplayResult, summary: Summary) -> None:
    """Draw the fraction of the KV cache in use, and the server's memory on a second axis."""
    points = [(each.at, 100 * each.cache) for each in run.snapshots if each.cache is not None]
    if points:
        axes.plot([at for at, _ in points], [value for _, value in points], color=INK["train"], label="KV cache (%)")
    axes.set(title="Memory", xlabel="time (s)", ylabel="% of the pages", ylim=(0, 102))
    names = sorted(name for name, most in (summary.queue.memory_most if summary.queue else {}).items() if most)
    if names:
        right = axes.twinx()
        for name in names:
            own = [(each.at, each.memory[name] / 2**30) for each in run.snapshots if name in each.memory]
            right.plot([at for at, _ in own], [value for _, value in own], linestyle="--", linewidth=1, label=name)
        right.set(ylabel="GiB")
        right.set_ylim(bottom=0)
        right.legend(frameon=False, loc="lower right")
    if axes.lines:
        axes.legend(frameon=False, loc="upper left")
