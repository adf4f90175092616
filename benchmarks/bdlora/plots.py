"""The BD-LoRA paper's figures 1 and 5 of the measured loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.bdlora.loads import Measured
from benchmarks.common.figures import panels

NAMES = {"nfs": "NFS-LoRA", "slora": "S-LoRA", "bd": "BD-LoRA", "bd2": "BD-LoRA, rank 2r"}
COLOURS = {"nfs": "tab:green", "slora": "tab:blue", "bd": "tab:orange", "bd2": "tab:red"}
PANELS: tuple[tuple[str, Callable[[Measured], float]], ...] = (
    ("throughput, output tok/s", lambda one: one.tok_s),
    ("E2E latency, s", lambda one: one.e2e_s),
    ("decode, ms a token", lambda one: one.decode_ms),
    ("prefill, ms", lambda one: one.prefill_ms),
)


def draw(loads: Sequence[Measured], folder: Path) -> None:
    """`bdlora_figure_5_SHAPE_tpN.png`: by parameters, a row a load. `bdlora_figure_1_tpN.png`: latency over
    parameters."""
    for shape, tp in sorted({(one.shape, one.tp) for one in loads if one.tp > 1}):
        own = [one for one in loads if (one.shape, one.tp) == (shape, tp)]
        ranks = {load: {one.lora_rank for one in own if one.load == load} - {0} for load in {one.load for one in own}}
        if any(len(found) > 1 for found in ranks.values()):  # else there are points alone, and no curves
            own = [one for one in own if len(ranks[one.load]) > 1]
        _figure_5(own, f"{shape}, {tp} GPUs", folder / f"bdlora_figure_5_{shape}_tp{tp}.png")
        _figure_1(own, f"{shape}, {tp} GPUs", folder / f"bdlora_figure_1_{shape}_tp{tp}.png")


def _figure_5(loads: Sequence[Measured], title: str, file: Path) -> None:
    shown = sorted({one.load for one in loads if one.strategy != "base"}, key=lambda load: (-load.prompt, load.batch))
    if not shown:
        return
    with panels(file, len(shown), len(PANELS), (15, 2.7 * len(shown)), title) as grid:
        for line, load in zip(grid, shown, strict=True):
            for axes, (name, value) in zip(line, PANELS, strict=True):
                for strategy, label in NAMES.items():
                    curve = sorted(
                        (one.row["adapter_parameters"] / 1e6, value(one))
                        for one in loads
                        if one.load == load and one.strategy == strategy and "adapter_parameters" in one.row
                    )
                    if curve:
                        axes.plot(*zip(*curve, strict=True), marker="o", label=label, color=COLOURS[strategy])
                base = next((one for one in loads if one.load == load and one.strategy == "base"), None)
                if base is not None:
                    axes.axhline(value(base), color="grey", linestyle="--", label="no adapter")
                axes.set(xscale="log", xlabel="adapter parameters, M", title=name)
                axes.grid(alpha=0.3)
            line[0].set_ylabel(f"{load.prompt} in, {load.output} out, batch {load.batch}")
        grid[0][0].legend(fontsize=8)


def _figure_1(loads: Sequence[Measured], title: str, file: Path) -> None:
    """End-to-end latency of one request over parameters, ranks in the plot; quality is no part of these
    measurements."""
    shown = sorted({one.load for one in loads if one.load.batch == 1 and one.strategy != "base"})
    if not shown:
        return
    with panels(file, 1, len(shown), (5 * len(shown), 4), f"{title}, one request") as grid:
        for axes, load in zip(grid[0], shown, strict=True):
            for strategy, label in NAMES.items():
                own = [one for one in loads if one.load == load and one.strategy == strategy]
                points = sorted((one.e2e_s, one.row["adapter_parameters"] / 1e6, one.row["rank"]) for one in own)
                if points:
                    axes.plot(
                        [p[0] for p in points], [p[1] for p in points], "o-", label=label, color=COLOURS[strategy]
                    )
                    for seconds, million, rank in points:
                        axes.annotate(str(rank), (seconds, million), fontsize=7)
            axes.set(yscale="log", xlabel="E2E latency, s", ylabel="adapter parameters, M")
            axes.set_title(f"{load.prompt} in, {load.output} out")
            axes.grid(alpha=0.3)
        grid[0][0].legend(fontsize=8)
