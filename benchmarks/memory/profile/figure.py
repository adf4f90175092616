"""A profile as a figure, like the ETS paper's figure 4.1: one panel for each series."""

from __future__ import annotations

from pathlib import Path

from benchmarks.common.figures import panels
from benchmarks.memory.profile.report import COMPONENTS, ProfileReport
from benchmarks.memory.profile.table import source_text

INK = {"weights": "#8d99ae", "no_grad": "#2a6f97", "act": "#e9a23b", "backward": "#bc4b51"}
GIB = 1 << 30
WIDEST = 4
"""Most panels side by side."""


def save_figure(path: Path, report: ProfileReport) -> None:
    """Draw stacked components over the number of rows. Series without points are left out."""
    drawn = [series for series in report.series if series.points]
    columns = max(1, min(WIDEST, len(drawn)))
    lines = max(1, -(-len(drawn) // columns))
    size = 4.6 * columns, 3.6 * lines + 0.6
    with panels(path, lines, columns, size, source_text(report), sharey=True) as grid:
        each = grid.flatten()
        for panel in each[len(drawn) :]:
            panel.set_visible(False)
        for panel, series in zip(each, drawn, strict=False):
            rows = [point.batch for point in series.points]
            stacks = [[(getattr(point.components, name) or 0) / GIB for point in series.points] for name in COMPONENTS]
            names = [f"M_{name}" for name in COMPONENTS]
            panel.stackplot(rows, stacks, labels=names, colors=list(INK.values()), lw=0.3)
            total = [point.components.total / GIB for point in series.points]
            panel.plot(rows, total, ".", color="black", markersize=4)
            panel.set_title(f"{series.workload.name}\n{series.backend}, {series.length} tokens a row", fontsize=9)
            panel.set(xlabel="rows of the batch", xlim=(min(rows), max(rows) if len(rows) > 1 else rows[0] + 1))
            panel.grid(alpha=0.25)
            panel.spines[["top", "right"]].set_visible(False)
        if drawn:
            each[0].set_ylabel("GiB")
            each[0].legend(loc="upper left", frameon=False, fontsize=8)
