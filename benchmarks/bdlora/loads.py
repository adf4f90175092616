"""Throughput and latency of every load: measured where it was run, else composed of prefill and decode steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.bdlora.plan import LOADS, STEP_TOKENS, TINY_LOADS, Load

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Measured:
    """One load of one variant."""

    shape: str
    tp: int
    strategy: str
    lora_rank: int
    load: Load
    e2e_s: float
    """From the first prompt's step to the last token, all requests."""
    prefill_ms: float
    decode_ms: float
    measured: bool
    """It was run; False: composed of its prefill and of decode steps at its mean context."""
    row: dict[str, Any]
    """Of the decode steps, or of the run."""

    @property
    def tok_s(self) -> float:
        """Output tokens."""
        return self.load.batch * self.load.output / self.e2e_s

    @property
    def variant(self) -> str:
        return self.strategy if self.strategy == "base" else f"{self.strategy}.r{self.lora_rank}"

    def record(self) -> dict[str, Any]:
        names = ("rank", "adapter_parameters", "adapter_parameters_held", "graphs", "layers", "commit")
        return {
            "shape": self.shape,
            "tp": self.tp,
            "variant": self.variant,
            "load": self.load.name,
            "tok_s": round(self.tok_s, 2),
            "e2e_s": round(self.e2e_s, 4),
            "prefill_ms": round(self.prefill_ms, 3),
            "decode_ms": round(self.decode_ms, 4),
            "measured": self.measured,
            **{name: self.row[name] for name in names if name in self.row},
        }


class Speedup(NamedTuple):
    """Throughput of `of` over that of `over`."""

    ratio: float
    of: Measured
    over: Measured


def loads_of(rows: Mapping[str, Row]) -> list[Measured]:
    """Every load of every variant that the rows hold, in the order of the loads."""
    bases = sorted(
        {(row["shape"], row["tp"], row["strategy"], row["lora_rank"]) for row in rows.values() if "what" in row}
    )
    found = list[Measured]()
    for shape, tp, strategy, rank in bases:
        for load in TINY_LOADS if shape.startswith("tiny") else LOADS:
            one = _run(rows, shape, tp, strategy, rank, load) or _composed(rows, shape, tp, strategy, rank, load)
            if one is not None:
                found.append(one)
    return found


def _variant(strategy: str, rank: int) -> str:
    return strategy if strategy == "base" else f"{strategy}.r{rank}"


def _run(rows: Mapping[str, Row], shape: str, tp: int, strategy: str, rank: int, load: Load) -> Measured | None:
    row = rows.get(f"bdlora.{shape}.tp{tp}.tok_s.{_variant(strategy, rank)}.{load.name}")
    if row is None:
        return None
    seconds = load.batch * load.output / row["value"]
    prefill = sorted(row["prefill_ms"])[len(row["prefill_ms"]) // 2]
    return Measured(shape, tp, strategy, rank, load, seconds, prefill, row["decode_ms"]["median"], True, dict(row))


def _composed(rows: Mapping[str, Row], shape: str, tp: int, strategy: str, rank: int, load: Load) -> Measured | None:
    start, variant = f"bdlora.{shape}.tp{tp}", _variant(strategy, rank)
    decode = rows.get(f"{start}.decode_ms.{variant}.b{load.batch}.c{load.context}")
    prefill = _prefill_ms(rows, f"{start}.prefill_ms.{variant}", load)
    if decode is None or prefill is None:
        return None
    seconds = (prefill + (load.output - 1) * decode["value"]) / 1e3
    return Measured(shape, tp, strategy, rank, load, seconds, prefill, decode["value"], False, dict(decode))


def _prefill_ms(rows: Mapping[str, Row], start: str, load: Load) -> float | None:
    """Of all prompts: that of one prompt with as many tokens, or of whole steps of `STEP_TOKENS`; None: not
    measured."""
    tokens = load.batch * load.prompt
    one = rows.get(f"{start}.{tokens}")
    if one is not None:
        return float(one["value"])
    whole = rows.get(f"{start}.{STEP_TOKENS}")
    return None if whole is None or tokens % STEP_TOKENS else float(whole["value"]) * (tokens // STEP_TOKENS)


def speedups(loads: Sequence[Measured]) -> list[Speedup]:
    """Of `bd` over `nfs` and `slora` at equal parameters, load by load; both measured, or both composed."""
    found = list[Speedup]()
    for of in loads:
        if of.strategy != "bd":
            continue
        for over in loads:
            same = (over.shape, over.tp, over.lora_rank, over.load) == (of.shape, of.tp, of.lora_rank, of.load)
            if same and over.strategy in ("nfs", "slora") and over.measured == of.measured:
                found.append(Speedup(of.tok_s / over.tok_s, of, over))
    return found


def table_2(loads: Sequence[Measured]) -> str:
    """Markdown: the paper's table 2 without its tasks: ranks, parameters, and what they cost, for each shape and number
    of GPUs."""
    lines = list[str]()
    for shape, tp, load in sorted({(one.shape, one.tp, one.load) for one in loads if one.tp > 1}):
        own = {
            (one.strategy, one.lora_rank): one for one in loads if (one.shape, one.tp, one.load) == (shape, tp, load)
        }
        base = own.get(("base", 0))
        lines += [
            f"### {shape}, {tp} GPUs, {load.prompt} in, {load.output} out, batch {load.batch}",
            "",
            "| strategy | rank | parameters, M | tok/s | E2E, s | decode, ms | prefill, ms | of the base |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for (strategy, _), one in sorted(own.items(), key=lambda pair: (pair[0][1], pair[0][0])):
            part = f"{one.tok_s / base.tok_s:.2f}" if base is not None else ""
            million = f"{one.row['adapter_parameters'] / 1e6:.1f}" if "adapter_parameters" in one.row else ""
            kind = "" if one.measured else " (composed)"
            graphs = "" if one.row.get("graphs", True) else ", no graphs"
            lines.append(
                f"| {strategy}{graphs} | {one.row.get('rank', '')} | {million} | {one.tok_s:.1f}{kind} | "
                f"{one.e2e_s:.3f} | "
                f"{one.decode_ms:.3f} | {one.prefill_ms:.2f} | {part} |"
            )
        lines.append("")
    return "\n".join(lines)
