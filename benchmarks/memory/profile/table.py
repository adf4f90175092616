"""A profile as tables for the terminal."""

from __future__ import annotations

from rich.table import Table

from benchmarks.memory.profile.lines import Line
from benchmarks.memory.profile.report import COMPONENTS, ProfileReport, Series

MIB = 1 << 20
COLUMNS = (*COMPONENTS, "total")


def source_text(report: ProfileReport) -> str:
    """The base, and whether the numbers were measured, on one line."""
    kind = f"measured on {report.device}" if report.measured else "PREDICTED, not measured"
    size = report.parameters / 1e6
    count = f"{size / 1e3:.2f} billion" if size >= 1e3 else f"{size:.1f} million"
    return f"{report.model}, {count} parameters, {report.dtype}: {kind} ({report.how})"


def series_table(series: Series) -> Table:
    """Build a table with one row for each size: the components and their sum, in MiB. Below, the line fitted to each
    column, and its errors."""
    title = f"{series.backend}, {series.workload.name}, {series.length} tokens a row: MiB"
    table = Table(title=title, title_justify="left")
    for name in ("rows", *(f"M_{name}" for name in COMPONENTS), "total"):
        table.add_column(name, justify="right")
    for point in series.points:
        values = [getattr(point.components, name) for name in COLUMNS]
        table.add_row(str(point.batch), *map(mib, values))
    if not series.lines:
        return table
    table.add_section()
    for name, cell in _LINE_ROWS.items():
        lines = [series.lines.get(column) for column in COLUMNS]
        table.add_row(name, *("" if line is None else cell(line) for line in lines))
    return table


def _error(line: Line) -> str:
    return "-" if line.worst_error is None else f"{line.worst_error:.1%}"


_LINE_ROWS = {
    "line: fixed": lambda line: mib(line.fixed),
    "KiB a row": lambda line: f"{line.per_row / 1024:.1f}",
    "KiB a token": lambda line: f"{line.per_token / 1024:.2f}",
    "R²": lambda line: f"{line.r2:.5f}",
    "worst error": _error,
}
"""Rows below a table, with the cell that each shows of a fitted line."""


def notes(series: Series) -> list[str]:
    """Notes on why sizes are missing, and on memory that the readings leave out."""
    kept = [("optimizer and gradient sums", series.optimizer), ("library workspaces", series.workspace)]
    besides = [f"{name} {mib(size)} MiB" for name, size in kept if size]
    if series.kv_per_token:
        besides.append(f"KV pages {series.kv_per_token / 1024:.1f} KiB a token")
    found = [] if series.ended is None else [series.ended]
    return [*found, f"besides: {', '.join(besides)}"] if besides else found


def mib(size: float | None) -> str:
    return "-" if size is None else f"{size / MIB:.1f}"
