"""Keys and figures of `ets.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common.figures import panels
from benchmarks.common.options import RESULTS
from benchmarks.common.results import Target
from benchmarks.common.summary import Key, update_summary
from benchmarks.ets.loads import BACKENDS, POLICIES

FILE = "ets.json"
FIGURE = Path("docs/figures/ets_figure_5_2.png")
TABLE, ANSWERS = "table52", "answers20"
HELD = 0.99
"""A policy breaks where fewer of the requests end within 10 s."""
UNITS = {"latency_mean_s": "s", "in_1s": "share", "in_10s": "share", "in_60s": "share", "finetune_tok_s": "tok/s"}
TARGETS = {("slack", "in_1s"): Target(1.0), ("slack", "in_10s"): Target(1.0)}
RATIOS = {"latency": Target(0.1, most=True), "finetune": Target(1.0)}

Rows = Mapping[str, Mapping[str, Any]]
Entries = dict[str, Key]


def systems_in(rows: Rows, cell: str, backend: str) -> dict[str, Mapping[str, Any]]:
    """Rows of a cell by policy, in the order of `POLICIES`; those with a delay of their own (`ets+1`) come last."""
    begin = f"{cell}." if backend == BACKENDS[0] else f"{cell}.{backend}."
    delayed = sorted(name for key in rows if key.startswith(begin) and "+" in (name := key.removeprefix(begin)))
    names = [*POLICIES, *(name for name in delayed if name.partition("+")[0] in POLICIES)]
    return {name: rows[begin + name] for name in names if begin + name in rows}


def keys(rows: Rows) -> Entries:
    """Of table 5.2 and its load with short answers, of `slack` against the paper's policies, and of the loads that each
    policy held."""
    found: Entries = {}
    for cell, backend in product((ANSWERS, TABLE), BACKENDS):
        of = systems_in(rows, cell, backend)
        begin = f"ets.{cell}" if backend == BACKENDS[0] else f"ets.{cell}.{backend}"
        for policy, row in of.items():
            for name, unit in UNITS.items():
                target = TARGETS.get((policy, name)) if backend == BACKENDS[0] and cell == TABLE else None
                found[f"{begin}.{policy}.{name}"] = row[name], unit, target, row
        if cell != TABLE:
            continue
        if backend == BACKENDS[0]:
            found |= against_papers(of)
        for policy, (factor, row) in held(rows, backend).items():
            found[f"ets.held_load.{policy if backend == BACKENDS[0] else f'{backend}.{policy}'}"] = (
                factor,
                "times table 5.1's load",
                None,
                row,
            )
    return found


def against_papers(of: Mapping[str, Mapping[str, Any]]) -> Entries:
    """`slack`'s mean latency over that of ETS, and its fine-tuning over that of the best TS(n)."""
    if "slack" not in of:
        return {}
    slack, found = of["slack"], Entries()
    sharing = [row["finetune_tok_s"] for policy, row in of.items() if policy.startswith("ts")]
    if "ets" in of:
        ratio = round(slack["latency_mean_s"] / of["ets"]["latency_mean_s"], 4)
        found["ets.table52.slack_over_ets.latency"] = ratio, "ratio", RATIOS["latency"], slack
    if sharing and max(sharing) > 0:
        ratio = round(slack["finetune_tok_s"] / max(sharing), 4)
        found["ets.table52.slack_over_ts.finetune"] = ratio, "ratio", RATIOS["finetune"], slack
    return found


def factors(rows: Rows, policy: str, backend: str) -> list[tuple[float, Mapping[str, Any]]]:
    """Rows by load, as a multiple of the table's, the smallest first."""
    name = policy if backend == BACKENDS[0] else f"{backend}.{policy}"
    table = rows.get(f"{TABLE}.{name}")
    if table is None:
        return []
    rated = [row for key, row in rows.items() if key.endswith(f".{name}") and row["part"] == "rates"]
    rated = [row for row in rated if row["system"]["name"] == name]
    unit = table["load"]["rate"]
    return sorted(((row["load"]["rate"] / unit, row) for row in (table, *rated)), key=lambda pair: pair[0])


def held(rows: Rows, backend: str) -> dict[str, tuple[float, Mapping[str, Any]]]:
    """The largest measured load up to which at least 99% of the requests end within 10 s; 0: not even the table's."""
    found = {}
    for policy in POLICIES:
        points = factors(rows, policy, backend)
        if len(points) < 2:
            continue
        most, at = 0.0, points[0][1]
        for factor, row in points:
            if row["in_10s"] < HELD:
                break
            most, at = factor, row
        found[policy] = most, at
    return found


def sizes(rows: Rows, policy: str, backend: str) -> list[tuple[int, float]]:
    """Rows of a fine-tuning request, and the mean latency."""
    name = policy if backend == BACKENDS[0] else f"{backend}.{policy}"
    of = [row for row in rows.values() if row["system"]["name"] == name and row["part"] in ("table", "figure")]
    return sorted((row["load"]["rows"], row["latency_mean_s"]) for row in of)


def publish(out: Path = RESULTS, figure: Path = FIGURE) -> None:
    """Draw the figures and update `summary.json`, from the result in `out`."""
    record = json.loads((out / FILE).read_text())
    rows = record["rows"]
    update_summary(out, "ets/measure.py", FILE, keys(rows))
    hardware = ", ".join(sorted({run["hardware"] for run in record["runs"].values()}))
    for backend in BACKENDS:
        if systems_in(rows, TABLE, backend):
            suffix = "" if backend == BACKENDS[0] else f"_{backend}"
            draw(rows, backend, hardware, figure.with_stem(figure.stem + suffix))


def draw(rows: Rows, backend: str, hardware: str, path: Path) -> None:
    """Figure 5.2, mean latency over the size of a fine-tuning request; beside it latency and fine-tuning over the
    load."""
    with panels(path, 1, 3, (14, 4), f"GPT-2 medium, bf16, random weights, {backend}, {hardware}") as (axes,):
        for index, policy in enumerate(POLICIES):
            style = {"marker": "o", "label": policy, "color": f"C{index}"}
            if curve := sizes(rows, policy, backend):
                axes[0].plot(*zip(*curve, strict=True), **style)
            if points := factors(rows, policy, backend):
                axes[1].plot([at for at, _ in points], [row["latency_mean_s"] for _, row in points], **style)
                axes[2].plot([at for at, _ in points], [row["finetune_tok_s"] for _, row in points], **style)
        axes[0].set(xlabel="rows of a fine-tuning request, every 20 s", title="Figure 5.2")
        axes[1].set(xlabel="load, times table 5.1's", title="More requests and rows")
        axes[2].set(xlabel="load, times table 5.1's", ylabel="fine-tuning tokens/s", title="Fine-tuning meanwhile")
        for each in axes[:2]:
            each.set(ylabel="mean latency, s", yscale="log")
        for each in axes:
            each.set_xscale("log", base=2)
            each.grid(alpha=0.3)
        axes[0].legend(fontsize=8)
