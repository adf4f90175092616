"""Tables of a run, for the terminal and the page."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from coserve.core.types import SloClass
from coserve.workloads.metrics import Spread
from coserve.workloads.summary import Summary

SHOWN_ADAPTERS = 8
"""Maximum rows of the table of adapters on a terminal."""
LATENCY_HEADER = ("", "mean", "p50", "p90", "p95", "p99")
ADAPTER_HEADER = ("adapter", "answered", "good", "satisfied", "TTFT p50", "TTFT p99", "TPOT p50", "E2E p99")
CLASS_HEADER = ("class", "answered", "good", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "E2E p99")
FAILURE_HEADER = ("error", "how often", "first message")


def latency_table(summary: Summary) -> Table:
    """Return rows TTFT, TPOT, ITL, E2E with mean and percentiles as columns."""
    return _table("Latency of the requests", LATENCY_HEADER, latency_rows(summary))


def latency_rows(summary: Summary) -> Iterator[tuple[str, ...]]:
    rows = {
        "TTFT  time to first token": summary.ttft,
        "TPOT  time per output token": summary.tpot,
        "ITL   inter-token latency": summary.itl,
        "E2E   whole request": summary.e2e,
    }
    for name, values in rows.items():
        yield name, *_cells(values)


def _cells(values: Spread | None) -> list[str]:
    if values is None:
        return ["-"] * 5
    return [duration_text(value) for value in (values.mean, values.p50, values.p90, values.p95, values.p99)]


def duration_text(seconds: float) -> str:
    """Return a duration with three significant digits: `12.3 ms`, `1.23 s`."""
    if not math.isfinite(seconds):
        return "-"
    value, unit = (seconds, "s") if abs(seconds) >= 1 else (seconds * 1000, "ms")
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"


def totals_table(summary: Summary) -> Table:
    """Return the rows of table 5.2 of the ETS paper, and rates."""
    return _table("Totals", None, totals_rows(summary))


def totals_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    yield "Requests answered", f"{summary.completed} of {summary.requests}"
    for code, count in sorted(summary.errors.items()):
        yield f"  failed: {code}", str(count)
    if summary.has_limits:
        yield from _limits_rows(summary)
    if summary.e2e is not None:
        yield "Inference latency, mean", duration_text(summary.e2e.mean)
    if summary.requests:
        for slo, share in summary.slo_attainment.items():
            yield f"SLO attainment, {slo} s", f"{share:.1%}"
        yield "User satisfaction (S-LoRA)", f"{summary.satisfaction:.3f}"
    if summary.has_limits:
        yield f"Goodput{_only_limits(summary)}", f"{summary.goodput:.2f} requests/s"
    yield "Request throughput", f"{summary.request_throughput:.2f} requests/s"
    yield "Output throughput", f"{summary.output_throughput:.0f} tokens/s"
    yield "Fine-tuning throughput", f"{summary.finetune_throughput:.0f} tokens/s"
    if summary.jobs:
        yield "  in the arrival window", f"{summary.finetune_window_throughput:.0f} tokens/s"
    if summary.finetune_peak and summary.finetune_share is not None:
        yield "  of its peak", f"{summary.finetune_share:.1%} of {summary.finetune_peak:.0f} tokens/s"
    yield "Fine-tuning jobs succeeded", f"{summary.jobs_succeeded} of {summary.jobs}"
    for code, count in sorted(summary.job_errors.items()):
        yield f"  failed: {code}", str(count)
    if summary.queue is not None:
        yield from _queue_rows(summary)
    if summary.lag is not None:
        yield "Sent late, p99", duration_text(summary.lag.p99)
    yield "Duration", duration_text(summary.duration)


def _queue_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    queue = summary.queue
    assert queue is not None
    for name, mean, most in (
        ("Requests waiting", queue.waiting_mean, queue.waiting_most),
        ("Requests running", queue.running_mean, queue.running_most),
    ):
        if mean is not None and most is not None:
            yield f"{name}, mean and most", f"{mean:.1f}, {most:.0f}"
    if queue.cache_most is not None:
        yield "KV cache in use, most", f"{queue.cache_most:.0%}"
    for name, size in queue.memory_most.items():
        if size:
            yield f"Memory, {name}, most", f"{size / 2**30:.2f} GiB"


def _limits_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    yield f"In the limits{_only_limits(summary)}", f"{summary.attainment:.1%}"
    if len(summary.classes) > 1:
        for each in summary.classes:
            share = summary.class_attainment(each.slo_class)
            limits = _limits_text(summary, each.slo_class) or " (no limits)"
            yield f"  {each.slo_class}{limits}", "-" if share is None else f"{share:.1%}"
    if len(summary.adapters) > 1:
        yield "  of the worst adapter", f"{summary.worst_attainment:.1%}"


def _only_limits(summary: Summary) -> str:
    """Return a text with the limits if all requests have the same ones, else an empty text."""
    return _limits_text(summary, summary.classes[0].slo_class) if len(summary.classes) == 1 else ""


def _limits_text(summary: Summary, slo_class: SloClass) -> str:
    parts = [f"{name} <= {duration_text(limit)}" for name, limit in summary.limits_of(slo_class).items()]
    return f" ({', '.join(parts)})" if parts else ""


def class_table(summary: Summary) -> Table:
    return _table("Classes", CLASS_HEADER, class_rows(summary))


def class_rows(summary: Summary) -> Iterator[tuple[str, ...]]:
    for each in summary.classes:
        share = summary.class_attainment(each.slo_class)
        yield (
            each.slo_class,
            f"{each.completed}/{each.requests}",
            "-" if share is None else f"{share:.1%}",
            *_parts((each.ttft, "p50"), (each.ttft, "p99"), (each.tpot, "p50"), (each.tpot, "p99"), (each.e2e, "p99")),
        )


def _parts(*wanted: tuple[Spread | None, str]) -> Iterator[str]:
    for values, part in wanted:
        yield "-" if values is None else duration_text(getattr(values, part))


def failure_rows(summary: Summary) -> Iterator[tuple[str, str, str]]:
    """Yield code, count and first message of failed requests, then of failed jobs."""
    for code, count in sorted(summary.errors.items()):
        yield code, str(count), summary.error_messages.get(code, "")
    for code, count in sorted(summary.job_errors.items()):
        yield f"{code} (jobs)", str(count), summary.job_error_messages.get(code, "")


def failure_lines(summary: Summary) -> Iterator[str]:
    """Yield texts such as `failed: invalid_request 10: prompt: expected ...`, for the terminal."""
    for code, count, message in failure_rows(summary):
        yield f"failed: {code} {count}{message and f': {message}'}"


def adapter_table(summary: Summary) -> Table:
    """Return the adapters with the lowest attainment."""
    rows = list(adapter_rows(summary))
    left = len(rows) - SHOWN_ADAPTERS
    title = f"Adapters, the worst {SHOWN_ADAPTERS} of {len(rows)}" if left > 0 else "Adapters"
    return _table(title, ADAPTER_HEADER, iter(rows[:SHOWN_ADAPTERS]))


def adapter_rows(summary: Summary) -> Iterator[tuple[str, ...]]:
    for each in summary.adapters:
        yield (
            "the base" if each.adapter is None else each.adapter,
            f"{each.completed}/{each.requests}",
            f"{each.attainment:.1%}" if summary.has_limits else "-",
            f"{each.satisfaction:.3f}",
            *_parts((each.ttft, "p50"), (each.ttft, "p99"), (each.tpot, "p50"), (each.e2e, "p99")),
        )


def _table(title: str, header: tuple[str, ...] | None, rows: Iterator[tuple[str, ...]]) -> Table:
    """Build a table: first column left-aligned, others right-aligned. On a narrow terminal only the first one wraps."""
    table = Table(
        title=title,
        title_justify="left",
        show_header=header is not None,
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for i, name in enumerate(header or ("", "")):
        table.add_column(name, justify="right" if i else "left", no_wrap=i > 0, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # names and messages may contain markup characters
    return table
