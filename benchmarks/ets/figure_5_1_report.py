"""Keys and the figure of `figure_5_1.json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.figures import panels
from benchmarks.common.options import RESULTS
from benchmarks.common.results import Target
from benchmarks.common.summary import update_summary
from benchmarks.ets.figure_5_1_shape import AS_SEGMENTED, GRAPHS, METHODS, PAPER, TASKS, TRAINER, Shape

FIGURE = Path("docs/figures/figure_5_1.png")
FLATNESS = Target(0.9)


def flatness(rows: Sequence[dict[str, Any]], shape: Shape = PAPER) -> dict[str, tuple[float, dict[str, Any]]]:
    """Throughput at the most adapters over that at one, at the default batch; and the row at the most.

    `kernels.flatness.a64_vs_a1` is the smaller of inference and fine-tuning, as the daemon runs them where that was
    measured.
    """
    of = {(row["task"], row["way"], row["batch"], row["adapters"]): row for row in rows}
    found = {}
    for task, method in (
        ("inference", GRAPHS),
        ("inference", "segmented"),
        *(("finetuning", each) for each in AS_SEGMENTED),
    ):
        ends = [of.get((task, method, shape.batch, shape.counts[at])) for at in (0, -1)]
        if ends[0] is not None and ends[1] is not None:
            ratio = round(ends[1]["value"] / ends[0]["value"], 4)
            found[f"kernels.figure_5_1.flatness.{task}.{method}"] = ratio, ends[1]
    trained = TRAINER if f"kernels.figure_5_1.flatness.finetuning.{TRAINER}" in found else "segmented"
    both = [f"kernels.figure_5_1.flatness.{part}" for part in (f"inference.{GRAPHS}", f"finetuning.{trained}")]
    if all(key in found for key in both):
        found["kernels.flatness.a64_vs_a1"] = min((found[key] for key in both), key=lambda pair: pair[0])
    return found


def over_grouped(rows: Sequence[dict[str, Any]], shape: Shape = PAPER) -> dict[str, tuple[float, dict[str, Any]]]:
    """`block_sparse`'s throughput over `grouped`'s, the paper's claim: the largest of all points of inference, and
    fine-tuning of the most adapters."""
    of = {(row["task"], row["way"], row["batch"], row["adapters"]): row for row in rows}
    points = dict[tuple[str, int, int], tuple[float, dict[str, Any]]]()
    for (task, method, batch, adapters), row in of.items():
        other = of.get((task, "grouped", batch, adapters))
        if method == "block_sparse" and other is not None:
            points[task, batch, adapters] = round(row["value"] / other["value"], 4), row
    inference = [point for (task, _, _), point in points.items() if task == "inference"]
    found = {}
    if inference:
        found["kernels.figure_5_1.block_sparse_over_grouped.inference.max"] = max(inference, key=lambda pair: pair[0])
    if most := points.get(("finetuning", shape.batch, shape.counts[-1])):
        found[f"kernels.figure_5_1.block_sparse_over_grouped.finetuning.a{shape.counts[-1]}"] = most
    return found


def publish(out: Path = RESULTS, figure: Path = FIGURE) -> None:
    """Draw the figure and update the keys in summary.json, from the result in `out`."""
    record = json.loads((out / "figure_5_1.json").read_text())
    rows = list(record["rows"].values())
    draw(rows, next(iter(record["runs"].values()))["hardware"], figure)
    for of, target in ((flatness(rows), FLATNESS), (over_grouped(rows), None)):
        found = {key: (value, "ratio", target, row) for key, (value, row) in of.items()}
        update_summary(out, "ets/figure_5_1.py", "figure_5_1.json", found)


def draw(rows: Sequence[dict[str, Any]], hardware: str, path: Path, shape: Shape = PAPER) -> None:
    with panels(path, 2, 2, (10, 7), f"GPT-2 medium, bf16, ranks 16 to 128, {hardware}") as grid:
        for line, task in zip(grid, TASKS, strict=True):
            for axes, vary, fixed, value in (
                (line[0], "adapters", "batch", shape.batch),
                (line[1], "batch", "adapters", shape.adapters),
            ):
                for index, method in enumerate(METHODS):
                    curve = sorted(
                        (row[vary], row["value"])
                        for row in rows
                        if row["task"] == task
                        and row["way"] == method
                        and row[fixed] == value
                        and row[vary] in shape.counts
                    )
                    if curve:
                        axes.plot(*zip(*curve, strict=True), marker="o", label=method, color=f"C{index}")
                axes.set(xscale="log", yscale="log", xlabel=f"{vary} ({fixed} {value})", ylabel="tokens/s", title=task)
                axes.set_xticks(shape.counts, [str(count) for count in shape.counts])
                axes.grid(alpha=0.3)
        grid[0][0].legend(fontsize=8)
