"""Figures of the committed results of `many.py` and `tiers.py`, as S-LoRA's figure 6 and InfiniLoRA's figure 5.

    python -m benchmarks.adapters.many --plot
    python -m benchmarks.adapters.tiers --plot

`docs/figures/adapters_many.png`: requests a second at saturation, p95 of the time to the first token at 70% of
saturation, and the share of requests whose first token came within 6 s at saturation, by number of adapters.
`docs/figures/adapters_ratio.png`: p95 of the time to the first token by the share of adapters that fit into the pool.
What no row has is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.figures import panels

FIGURES = Path("docs/figures")
KINDS = {"s1": "rank 8", "s2": "ranks 8 to 64", "s4": "13B, ranks 16 to 64"}
SUFFIXES = {
    "": ", read at first use",
    ".warm": ", in host memory",
    ".no_prefetch": ", no prefetch",
    ".no_overlap": ", no overlap",
    ".no_pool": ", memory apart",
}
Rows = Mapping[str, Mapping[str, Any]]
Lines = dict[str, list[tuple[int, float]]]
"""Points of number of adapters and value, by label."""


def lines(rows: Rows, pattern: str, label: Callable[[re.Match[str]], str], field: str = "value") -> Lines:
    """Of rows whose key is `pattern` and that have `field`; the pattern's first group is the number of adapters."""
    found: Lines = {}
    for key, row in rows.items():
        if (match := re.fullmatch(pattern, key)) and row.get(field) is not None:
            found.setdefault(label(match), []).append((int(match[1]), row[field]))
    return {name: sorted(points) for name, points in sorted(found.items())}


def ending(suffix: str) -> str:
    """What the ending of a key says, such as `.warm.no_pool`."""
    return "".join(SUFFIXES[f".{part}"] for part in suffix.split(".")[1:]) or SUFFIXES[""]


def setting(match: re.Match[str]) -> str:
    return f"{KINDS[match[3]]}{', uniform' if match[2] == 'uniform' else ''}{ending(match[4])}"


def hardware(record: Mapping[str, Any]) -> str:
    """The GPUs of a result's runs; the first line of each names one."""
    return ", ".join(sorted({run["hardware"].splitlines()[0] for run in record["runs"].values()}))


def draw_many(results: Path, figures: Path = FIGURES) -> None:
    """`adapters_many.png` from `adapters_many.json`."""
    record = json.loads((results / "adapters_many.json").read_text())
    rows, saturated = record["rows"], r"adapters\.requests_s\.(\d+)\.(alpha1|uniform)\.(s\d)(.*)"
    served = lines(rows, saturated, setting)
    peer = r"adapters\.vllm\.requests_s\.(\d+)\.(alpha1|uniform)\.(.*)"
    served |= lines(rows, peer, lambda found: f"vLLM {found[3]}{', uniform' if found[2] == 'uniform' else ''}")
    shown = {
        "requests/s at saturation": served,
        "p95 TTFT at 70% of saturation, ms": lines(
            rows, r"adapters\.ttft_p95_ms\.(\d+)(.*)", lambda found: f"rank 8{ending(found[2])}"
        ),
        "share with TTFT ≤ 6 s at saturation": lines(rows, saturated, setting, "within_6_s"),
    }
    _draw({name: each for name, each in shown.items() if each}, hardware(record), figures / "adapters_many.png")


def draw_ratio(results: Path, figures: Path = FIGURES) -> None:
    """`adapters_ratio.png` from `adapter_tiers.json`, if that has more than one share."""
    record = json.loads((results / "adapter_tiers.json").read_text())
    pattern = r"adapters\.ratio\.ttft_p95_ms\.(\d+)%"
    shown = {
        "p95 TTFT, ms": lines(record["rows"], pattern, lambda _: "p95"),
        "share with TTFT ≤ 250 ms": lines(record["rows"], pattern, lambda _: "within 250 ms", "within_250_ms"),
    }
    if any(len(points) > 1 for points in shown["p95 TTFT, ms"].values()):
        _draw(shown, hardware(record), figures / "adapters_ratio.png", "% of 100 adapters that fit into the pool")


def _draw(shown: Mapping[str, Lines], title: str, path: Path, across: str = "adapters") -> None:
    """One panel for each entry."""
    with panels(path, 1, len(shown), (5 * len(shown), 3.8), title) as (axes,):
        for axis, (name, drawn) in zip(axes, shown.items(), strict=True):
            for label, points in drawn.items():
                axis.plot(*zip(*points, strict=True), marker="o", label=label)
            axis.set(xlabel=across, ylabel=name, ylim=(0, None))
            axis.margins(y=0.1)
            if across == "adapters":
                axis.set_xscale("log")
            axis.legend(fontsize=7)
