"""Keys and figures of the kernel benchmarks, from the committed results; needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.common.figures import panels
from benchmarks.common.summary import update_summary

FIGURES = Path("docs/figures")
Row = dict[str, Any]
OTHERS = ("grouped", "stk128", "stk64", "stk32", "stk16")
STK = OTHERS[1:]


def summarize(results: Path, figures: Path = FIGURES) -> None:
    """Update `summary.json` in `results` and draw the figures of the parts that exist into `figures`."""
    parts = {
        path.stem.removeprefix("kernels_"): json.loads(path.read_text()) for path in results.glob("kernels_*.json")
    }

    def put(key: str, value: float, unit: str, target: str, part: str) -> None:
        found = round(value, 4), unit, target, {"date": parts[part]["date"]}
        update_summary(results, "kernels/lora.py", f"kernels_{part}.json", {f"kernels.{key}": found})

    if "step" in parts:
        _step(parts["step"]["rows"], put)
    if "train" in parts:
        _train(parts["train"]["rows"], put)
    if "scaling" in parts:
        _scaling(parts["scaling"]["rows"], put)
    if "decode" in parts and "prefill" in parts:
        _grids(parts["decode"]["rows"], parts["prefill"]["rows"], put)
    if "decode" in parts:
        _popularity_figure(parts["decode"]["rows"], figures)


def us(row: Row, column: str) -> float:
    return float(row["us"][column]["us"])


def _step(rows: list[Row], put: Any) -> None:  # noqa: ANN401
    of = {row["case"]: row for row in rows}
    target = "<= 0.9"
    for case in ("a32", "a1"):
        for kind in ("", ".exact", ".bucket64"):
            if f"step.{case}{kind}" in of:
                value = us(of[f"step.{case}{kind}"], "segmented") / 1e3
                put(f"lora_step_ms.b64.{case}{kind}", value, "ms", "(not set)" if kind else target, "step")
    own = us(of["layer.a32.segmented"], "segmented")
    stk = min(us(of[f"layer.a32.{method}"], method) for method in STK)
    put("speedup_vs_stk.decode.a32", stk / own, "x", ">= 6", "step")
    put("speedup_vs_grouped.decode.a32", us(of["layer.a32.grouped"], "grouped") / own, "x", ">= 20", "step")


def _train(rows: list[Row], put: Any) -> None:  # noqa: ANN401
    def total(column: str) -> float:
        return sum(us(row, column) for row in rows)

    put("prefill_fwd_overhead", total("forward") / total("base_forward"), "fraction", "<= 0.13", "train")
    put("train_bwd_overhead", total("backward") / total("base_backward"), "fraction", "<= 0.22", "train")
    put("train_bwd_overhead.sums", total("backward_summed") / total("base_backward"), "fraction", "<= 0.22", "train")
    and_add = total("backward_and_add") / total("base_backward")
    put("train_bwd_overhead.with_autograd_add", and_add, "fraction", "(not set)", "train")
    if not all("autograd_stk64" in row["us"] and "autograd_stk128" in row["us"] for row in rows):
        return
    stk = sum(min(us(row, "autograd_stk64"), us(row, "autograd_stk128")) for row in rows)
    put("speedup_vs_stk.training", stk / total("autograd_segmented"), "x", ">= 2", "train")


def _scaling(rows: list[Row], put: Any) -> None:  # noqa: ANN401
    for name, key in (("prefill", "flatness.sites.prefill.a64_vs_a1"), ("decode", "flatness.sites.decode.a64_vs_a1")):
        of = {row["adapters"]: row["us"] for row in rows if row["case"] == f"gpt2.{name}"}
        times = {adapters: of[adapters]["base"] + of[adapters]["segmented"] for adapters in of}
        put(key, times[1] / times[64], "ratio", "(not set)", "scaling")
    for name, key in (("decode", "mixed_rank_penalty"), ("prefill", "mixed_rank_penalty.prefill")):
        of = {row["ranks"]: row["us"]["segmented"] for row in rows if row["case"] == f"ranks.{name}"}
        put(key, of["mixed"] / of["30"] - 1, "fraction", "<= 0.15", "scaling")


def _grids(decode: list[Row], prefill: list[Row], put: Any) -> None:  # noqa: ANN401
    layer = [
        row
        for row in prefill
        if row["model"].startswith("llama")
        and (row["tokens"], row["ranks"], row["popularity"]) == (4096, "16", "distinct")
    ]
    stk = sum(min(us(row, method) for method in STK) for row in layer)
    put("speedup_vs_stk.prefill", stk / sum(us(row, "segmented") for row in layer), "x", ">= 2", "prefill")
    if all("block_sparse" in row["us"] for row in layer):
        whole = sum(us(row, "block_sparse") for row in layer) / sum(us(row, "segmented") for row in layer)
        put("speedup_vs_stk.prefill.with_gather_and_add", whole, "x", "(not set)", "prefill")
    ratios = []
    for row in [*decode, *prefill]:
        others = [us(row, method) for method in OTHERS if method in row["us"]]
        what = {key: row[key] for key in ("model", "group", "tokens", "popularity", "ranks")}
        ratios.append((min(others) / us(row, "segmented"), what))
    ratios.sort(key=lambda item: item[0])
    for ratio, what in ratios[:12]:
        print(f"  {ratio:.2f} {what}")
    print(f"  slower in {sum(ratio < 1 for ratio, _ in ratios)} of {len(ratios)} cases")
    put("min_speedup", ratios[0][0], "x", ">= 1", "decode")
    put("max_relative_error", max(row["error"] for row in [*decode, *prefill]), "fraction", "<= 0.01", "decode")


METHODS = {"segmented": "segmented", "stk32": "stk, block 32", "grouped": "grouped", "gather_bmm": "gather-bmm"}


def _popularity_figure(rows: list[Row], folder: Path) -> None:
    """Punica's figure 8: time of the operator over batch size, by popularity. Llama's o_proj, rank 16."""
    with panels(folder / "kernels_popularity.png", 1, 4, (14, 3.4), sharey=True) as (axes,):
        for axis, popularity in zip(axes, ("distinct", "uniform", "skewed", "identical"), strict=True):
            own = [
                row
                for row in rows
                if row["model"].startswith("llama")
                and row["group"] == "o"
                and row["ranks"] == "16"
                and (row["popularity"] == popularity or row["tokens"] == 1)
            ]
            for method, label in METHODS.items():
                points = [(row["tokens"], us(row, method)) for row in own if method in row["us"]]
                axis.plot(*zip(*points, strict=True), marker="o", label=label)
            axis.plot(
                [r["tokens"] for r in own], [r["floor_us"] for r in own], "k--", linewidth=1, label="memory floor"
            )
            axis.set(title=popularity, xscale="log", yscale="log", xlabel="tokens, one a sequence")
        axes[0].set_ylabel("µs (4096 to 4096, rank 16, H200)")
        axes[-1].legend(fontsize=8)
