"""Reports of a replay: tables, a JSON file, a plot."""

from __future__ import annotations

import math
import tempfile
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

from coserve.errors import InvalidRequest
from coserve.types import Wire
from coserve.workloads.metrics import Spread, Summary, e2e, ttft
from coserve.workloads.replay import ReplayResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = {"ttft": "#2a6f97", "e2e": "#bc4b51", "train": "#5b8e7d"}


class Report(Wire, frozen=True):
    """The content of the JSON file."""

    summary: Summary
    run: ReplayResult


def check_folder(folder: Path) -> None:
    """Make the folder of a report. Raises `InvalidRequest` if no file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidRequest(f"cannot write into the folder {str(folder)!r}: {reason}", field="report") from error


def write_report(folder: Path, run: ReplayResult, summary: Summary) -> list[Path]:
    """`report.json` and `report.png` in `folder`, which is made if need be; the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    json, plot = folder / "report.json", folder / "report.png"
    json.write_bytes(msgspec.json.format(msgspec.json.encode(Report(summary=summary, run=run)), indent=1))
    save_plot(plot, run, summary)
    return [json, plot]


def latency_table(summary: Summary) -> Table:
    """Rows TTFT, TPOT, ITL, E2E; columns mean and percentiles."""
    table = Table(title="Latency of the requests", title_justify="left")
    for name in ("", "mean", "p50", "p95", "p99"):
        table.add_column(name, justify="left" if not name else "right")
    rows = {
        "TTFT  time to first token": summary.ttft,
        "TPOT  time per output token": summary.tpot,
        "ITL   inter-token latency": summary.itl,
        "E2E   whole request": summary.e2e,
    }
    for name, values in rows.items():
        table.add_row(name, *_cells(values))
    return table


def _cells(values: Spread | None) -> list[str]:
    if values is None:
        return ["-"] * 4
    return [duration_text(value) for value in (values.mean, values.p50, values.p95, values.p99)]


def duration_text(seconds: float) -> str:
    """Three significant digits: `12.3 ms`, `1.23 s`."""
    if not math.isfinite(seconds):
        return "-"
    value, unit = (seconds, "s") if abs(seconds) >= 1 else (seconds * 1000, "ms")
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"


def totals_table(summary: Summary) -> Table:
    """The rows of table 5.2 of the ETS paper, and rates."""
    table = Table(title="Totals", title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("Requests answered", f"{summary.completed} of {summary.requests}")
    for code, count in sorted(summary.errors.items()):
        table.add_row(f"  failed: {code}", str(count))
    if summary.e2e is not None:
        table.add_row("Inference latency, mean", duration_text(summary.e2e.mean))
    for slo, share in summary.slo_attainment.items():
        table.add_row(f"SLO attainment, {slo} s", f"{share:.1%}")
    table.add_row(f"Goodput{_limits_text(summary)}", f"{summary.goodput:.2f} requests/s")
    table.add_row("Request throughput", f"{summary.request_throughput:.2f} requests/s")
    table.add_row("Output throughput", f"{summary.output_throughput:.0f} tokens/s")
    table.add_row("Fine-tuning throughput", f"{summary.finetune_throughput:.0f} tokens/s")
    table.add_row("Fine-tuning jobs succeeded", f"{summary.jobs_succeeded} of {summary.jobs}")
    for code, count in sorted(summary.job_errors.items()):
        table.add_row(f"  failed: {code}", str(count))
    table.add_row("Duration", duration_text(summary.duration))
    return table


def _limits_text(summary: Summary) -> str:
    limits = (("TTFT", summary.limits.ttft), ("TPOT", summary.limits.tpot), ("E2E", summary.limits.e2e))
    parts = [f"{name} <= {duration_text(limit)}" for name, limit in limits if limit is not None]
    return f" ({', '.join(parts)})" if parts else ""


def save_plot(path: Path, run: ReplayResult, summary: Summary) -> None:
    """Three panels: latency of each request by arrival, its distribution against the SLOs, tokens trained over time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    by_arrival, distribution, training = figure.subplots(1, 3)
    _plot_by_arrival(by_arrival, run)
    _plot_distribution(distribution, run, [float(slo) for slo in summary.slo_attainment])
    _plot_training(training, run)
    for axes in (by_arrival, distribution, training):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _plot_by_arrival(axes: Axes, run: ReplayResult) -> None:
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


def _plot_distribution(axes: Axes, run: ReplayResult, slos: list[float]) -> None:
    """Cumulative distribution of E2E and TTFT over all requests."""
    good = [sample for sample in run.samples if sample.error is None]
    for name, values in (("ttft", [ttft(sample) for sample in good]), ("e2e", [e2e(sample) for sample in good])):
        ordered = sorted(value for value in values if value is not None)
        shares = [(i + 1) / len(run.samples) for i in range(len(ordered))]
        if ordered:
            axes.step(ordered, shares, where="post", color=INK[name], label=name.upper())
    for slo in slos:
        axes.axvline(slo, color="grey", linestyle=":", linewidth=1)
        axes.annotate(f"{slo:g} s", (slo, 0.02), color="grey", fontsize=8, rotation=90, ha="right")
    axes.set(title="Share of requests within", xlabel="seconds", ylim=(0, 1.02), xscale="log")
    if good:
        axes.legend(frameon=False, loc="center right")


def _plot_training(axes: Axes, run: ReplayResult) -> None:
    steps = sorted(step for job in run.jobs for step in job.trained)
    times = [0.0, *(at for at, _ in steps), run.duration]
    totals = [0, *accumulate(tokens for _, tokens in steps)]
    axes.step(times, [*totals, totals[-1]], where="post", color=INK["train"])
    axes.set(title="Tokens fine-tuned", xlabel="time (s)", ylabel="tokens")
    axes.set_ylim(bottom=0)
