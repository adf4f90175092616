"""Keys and figure of `equal_loads.json`, and keys of `equal_loads_h200.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common.figures import panels
from benchmarks.common.options import RESULTS
from benchmarks.common.results import Target
from benchmarks.common.summary import update_summary

FILE = "equal_loads.json"
"""All systems on GPUs of one machine: H100s."""
H200_FILE = "equal_loads_h200.json"
"""coserve on an H200; its keys begin with `h200.`."""
TWO_FILE = "equal_loads_two.json"
"""Systems on two GPUs; its keys begin with `two.`."""
FIGURE = Path("docs/figures/equal_loads.png")
LOOSE, STRICT = (5.0, 0.045), (1.0, 0.02)
"""Limits of TTFT and TPOT, in seconds."""
TARGETS = {
    "coserve.slo.r5": Target(0.995),
    "coserve.ft_share.r5": Target(0.85),
    "coserve.ttft_p50_ms.r5": Target(100, most=True),
    "coserve.slo_strict.r5": Target(0.99),
    "coserve.ft_share_strict.r5": Target(0.6),
    "coserve.slo.r20": Target(0.995),
    "coserve.ft_share.r20": Target(0.7),
    "coserve.slo_strict.r20": Target(0.99),
    "coserve.ft_share_strict.r20": Target(0.45),
    "coserve.efficiency.min": Target(1.0),
    "coserve.efficiency.r5": Target(1.0),
    "coserve.efficiency.r20": Target(1.0),
    "coserve.ft_share.min": Target(0.05),
}
MAIN = ("r5", "r20")
ATTAINED = 0.99
"""Share of the requests within their limits at which training is compared."""

Row = Mapping[str, Any]
Rows = Mapping[str, Row]
Entries = dict[str, tuple[float, str, Row]]
"""Key: value, unit, and the row that gives the date."""


def system_of(policy: str) -> str:
    """The name of coserve under a policy, in rows and keys."""
    return "coserve" if policy == "slack" else f"coserve.{policy}"


def peer_system(share: int | None, duty: float) -> str:
    """The name of vLLM beside PEFT, which has a share of the threads under MPS, and computes for a part of the time."""
    parts = [*([] if share is None else [f"mps{share}"]), *([] if duty == 1 else [f"d{duty:g}"])]
    return "vllm+peft" + (f"@{'.'.join(parts)}" if parts else "")


def equal_attainment(rows: Rows) -> Entries:
    """The most that PEFT beside vLLM trains while `ATTAINED` of the requests are within their limits, whatever its
    share and its duty cycle (0: at none of those measured), and what coserve trains then."""
    found: Entries = {}
    for rate, suffix in product(MAIN, ("", ".strict")):
        kept = "in_slo_strict" if suffix else "in_slo"
        peers = [row for key, row in rows.items() if key.startswith(f"{rate}.vllm+peft")]
        coserve = [row for key, row in rows.items() if key.startswith(f"{rate}{suffix}.coserve")]
        if len(peers) < 2 or not coserve:  # without a sweep it says nothing about the peer's best
            continue
        name = f"peers.equal_attainment.{rate}{suffix}"
        for key, each, attained in ((name, peers, kept), (f"{name}.coserve", coserve, "in_slo")):
            within = [row for row in each if row[attained] >= ATTAINED]
            best = max(within or each, key=lambda row: float(row["finetune_tok_s"]))
            found[key] = best["finetune_tok_s"] if within else 0.0, "tok/s", best
    return found


def ours(rows: Rows) -> list[str]:
    """The names of coserve under the policies that were measured."""
    return sorted({"coserve" + key.partition(".coserve")[2] for key in rows if ".coserve" in key})


def share(row: Row, system: str, rows: Rows) -> float:
    """Fine-tuning's share of what it reaches alone on the whole GPU. Under `spatial` its own peak is that of a part of
    the GPU."""
    peaks = {each: peak["value"] for each in ours(rows) if (peak := rows.get(f"peak.{each}"))}
    of_part = peaks[system] / max(peaks.values()) if system == system_of("spatial") and system in peaks else 1.0
    return round(float(row["finetune_share"]) * of_part, 4)


def target_of(key: str, rows: Rows) -> Target | None:
    """All policies have the same targets."""
    for system in ours(rows):
        if (target := TARGETS.get("coserve" + key.removeprefix(system))) is not None and key.startswith(f"{system}."):
            return target
    return None


def keys(rows: Rows) -> Entries:
    """Every key that the rows allow."""
    found: Entries = {}
    for rate in MAIN:
        for system in ours(rows):
            for suffix, cell in (("", rate), ("_strict", f"{rate}.strict")):
                if row := rows.get(f"{cell}.{system}"):
                    found[f"{system}.slo{suffix}.{rate}"] = row["in_slo"], "share", row
                    found[f"{system}.ft_share{suffix}.{rate}"] = share(row, system, rows), "share of the peak", row
                    found[f"{system}.ft_tok_s{suffix}.{rate}"] = row["finetune_tok_s"], "tok/s", row
                    found[f"{system}.ttft_p50_ms{suffix}.{rate}"] = row["ttft_ms"]["p50"], "ms", row
        if row := rows.get(f"{rate}.vllm+peft"):
            found[f"peers.slo.{rate}"] = row["in_slo"], "share", row
            found[f"peers.slo_strict.{rate}"] = row["in_slo_strict"], "share", row
            found[f"peers.ft_tok_s.{rate}"] = row["finetune_tok_s"], "tok/s", row
            found[f"peers.ft_share.{rate}"] = row["finetune_share"], "share of the peak", row
    for system, name in (*((each, each) for each in ours(rows)), ("vllm+peft", "peers")):
        if row := rows.get(f"peak.{system}"):
            found[f"{name}.ft_peak_tok_s"] = row["value"], "tok/s", row
        for rate in ("r1", "r5"):
            if row := rows.get(f"flexllm.{rate}.{system}"):
                found[f"{name}.flexllm.slo.{rate}"] = row["in_slo"], "share", row
                found[f"{name}.flexllm.ft_share.{rate}"] = share(row, system, rows), "share of the peak", row
    for system in ours(rows):
        found |= efficiencies(rows, system)
    return found | equal_attainment(rows)


def capacity(rows: Rows) -> tuple[float, Row] | None:
    """The most requests a second that were served in the limits without fine-tuning."""
    alone = [row for key, row in rows.items() if key.endswith(".alone")]
    return max(((row["goodput"], row) for row in alone), key=lambda pair: pair[0], default=None)


def efficiencies(rows: Rows, system: str) -> Entries:
    """Fine-tuning's share of its peak, plus requests a second in the limits over the most that were served without
    fine-tuning."""
    most, found = capacity(rows), Entries()
    loads = [row for key, row in rows.items() if key.endswith(f".{system}") and is_of_curve(key)]
    if most is None or not most[0] or not loads:
        return found
    found["coserve.served_alone"] = most[0], "requests/s in the limits", most[1]
    for row in loads:
        value = round(share(row, system, rows) + row["goodput"] / most[0], 4)
        found[f"{system}.efficiency.r{row['rate']:g}"] = value, "share", row
    worst = min((each for key, each in found.items() if "efficiency" in key), key=lambda each: each[0])
    found[f"{system}.efficiency.min"] = worst
    least = min(loads, key=lambda row: share(row, system, rows))
    found[f"{system}.ft_share.min"] = share(least, system, rows), "share of the peak", least
    return found


def is_of_curve(key: str) -> bool:
    """Whether a row is of the preset's load under the wider limits."""
    return key.startswith("r") and ".strict." not in key


def publish(out: Path = RESULTS, figure: Path = FIGURE) -> None:
    """Draw the figure and update `summary.json`, from the results in `out`."""
    record = json.loads((out / FILE).read_text())
    for file, prefix in ((FILE, ""), (H200_FILE, "h200."), (TWO_FILE, "two.")):
        if (out / file).exists():
            rows = json.loads((out / file).read_text())["rows"]
            found = {prefix + key: (*each[:2], target_of(key, rows), each[2]) for key, each in keys(rows).items()}
            update_summary(out, "peers/equal_loads.py", file, found)
    if any("efficiency" in key for key in keys(record["rows"])):
        draw(record["rows"], ", ".join(sorted({run["hardware"] for run in record["runs"].values()})), figure)


def draw(rows: Rows, hardware: str, path: Path) -> None:
    """Requests in the limits and fine-tuning over the load, under each policy; the efficiency is their sum."""
    most = capacity(rows)
    assert most is not None, "the efficiency was computed"
    systems = ours(rows)
    rates = sorted({float(row["rate"]) for key, row in rows.items() if ".coserve" in key and is_of_curve(key)})
    width = 0.8 / len(systems)
    title = f"Llama-3.1-8B's shape, random weights, 32 adapters, {hardware}"
    with panels(path, 1, 2, (11, 4), title) as ((left, right),):
        for index, system in enumerate(systems):
            loads = [row for key, row in rows.items() if key.endswith(f".{system}") and is_of_curve(key)]
            at = [rates.index(row["rate"]) + (index - (len(systems) - 1) / 2) * width for row in loads]
            shares = [share(row, system, rows) for row in loads]
            served = [row["goodput"] / most[0] for row in loads]
            left.bar(at, shares, 0.9 * width, color=f"C{index}", label=f"{system}: fine-tuning, of its peak")
            left.bar(at, served, 0.9 * width, bottom=shares, color=f"C{index}", alpha=0.4)
        left.axhline(1.0, color="black", linewidth=0.8)
        left.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
        left.set(
            xlabel="requests/s",
            ylabel="efficiency",
            ylim=(0, 1.35),
            title="pale: requests/s in the limits, of the most alone",
        )
        left.legend(fontsize=7)
        for index, system in enumerate((*ours(rows), "vllm+peft")):
            of = [row for rate in MAIN if (row := rows.get(f"{rate}.{system}"))]
            right.scatter(
                [row["finetune_tok_s"] for row in of], [row["in_slo"] for row in of], label=system, color=f"C{index}"
            )
            for row in of:
                right.annotate(f"{row['rate']:g}/s", (row["finetune_tok_s"], row["in_slo"]), fontsize=8)
        right.set(
            xlabel="fine-tuning tokens/s",
            ylabel="share in 5 s and 45 ms",
            ylim=(-0.05, 1.05),
            title="the same arrivals",
        )
        right.legend(fontsize=8)
