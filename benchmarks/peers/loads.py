"""The cells of `benchmarks/peers/equal_loads.py`: rates, limits and traces."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.peers.equal_report import LOOSE, STRICT
from benchmarks.serving.http_case import FULL, RANK, SMALL
from coserve.workloads.trace import PromptArrival, Repeatable, Trace


@dataclass(frozen=True)
class Cell:
    """`rate`: requests a second for `seconds`. `limits`: TTFT and TPOT, in seconds. Cells of the same `trace` send the
    same prompts."""

    name: str
    rate: float
    seconds: float
    limits: tuple[float, float]
    preset: str = "equal-8b"

    @property
    def trace(self) -> str:
        return self.name.removesuffix(".strict")

    @property
    def expected(self) -> float:
        """Seconds, with the longest answer, whose tokens may come as late as the limit allows."""
        return self.seconds + FULL.longest_out * self.limits[1]


def chosen_cells(system: str, *, tiny: bool) -> list[Cell]:
    """In the order in which they are measured. `system`: without the part of a peer's name from `@` on."""
    main = [Cell(f"r{rate}", float(rate), 45.0, LOOSE) for rate in (5, 20)]
    strict = [replace(cell, name=f"{cell.name}.strict", limits=STRICT) for cell in main]
    others = [
        Cell(f"r{rate}", float(rate), seconds, LOOSE)
        for rate, seconds in ((1, 30.0), (10, 25.0), (40, 20.0), (60, 20.0))
    ]
    flexllm = [Cell(f"flexllm.r{rate}", float(rate), 40.0, LOOSE, "flexllm-8b") for rate in (1, 5)]
    alone = [Cell(f"r{rate}", float(rate), 20.0, LOOSE) for rate in (40, 60, 80)]
    chosen = {
        "alone": alone,
        "coserve": [*main, *strict, *others, *flexllm],
        "vllm": [*main, *alone],
        "vllm+peft": [*main, *flexllm],
    }[system]
    if tiny:
        small = [chosen[0], chosen[2], chosen[-1]] if system == "coserve" else chosen[:1]
        return [replace(cell, seconds=4.0, rate=2.0) for cell in small]
    return chosen


def scenario_of(cell: Cell, *, tiny: bool) -> dict[str, Any]:
    """Settings of the cell's workload. Jobs are in it for their rows and settings; they are not sent with the
    prompts."""
    given: dict[str, Any] = {"preset": cell.preset, "rate": cell.rate, "duration": cell.seconds, "lead": 0.0}
    given |= {"slo_ttft": cell.limits[0], "slo_tpot": cell.limits[1]}
    if tiny:
        given |= {"vocab": SMALL.config["vocab_size"], "max_prompt_tokens": 64, "max_tokens": 16, "row_tokens": 64}
        given |= {"batch_tokens": 128, "finetune_rows": 4, "adapters": 2, "rank": (RANK,), "steps": 3}
    return given


def only_prompts(trace: Trace) -> Trace:
    return Trace(
        trace.scenario, Repeatable(lambda: (each for each in trace.arrivals if isinstance(each, PromptArrival)))
    )
