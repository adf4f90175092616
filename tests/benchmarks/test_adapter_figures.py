"""Figures of many adapters: which points they have. And what is read of a daemon's metrics for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from benchmarks.adapters import fleet
from benchmarks.adapters.figures import draw_many, draw_ratio


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, dict[str, list[float]]]]:
    """By file and axis: the y values of each line."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}

    def keep(figure: Figure, path: Path, **_: object) -> None:
        found[path.name] = {
            axis.get_ylabel(): {str(line.get_label()): [float(y) for y in line.get_ydata()] for line in axis.lines}  # type: ignore[union-attr]
            for axis in figure.axes
        }

    monkeypatch.setattr(Figure, "savefig", keep)
    return found


def write(folder: Path, name: str, rows: dict[str, dict[str, Any]]) -> None:
    (folder / name).write_text(json.dumps({"runs": {"a": {"hardware": "here"}}, "rows": rows}))


def test_a_line_for_each_setting(tmp_path: Path, drawn: dict[str, dict[str, dict[str, list[float]]]]) -> None:
    key = "adapters.requests_s"
    rows = {
        f"{key}.500.alpha1.s1.warm": {"value": 2.0, "within_6_s": 0.9},
        f"{key}.5.alpha1.s1.warm": {"value": 3.0, "within_6_s": 1.0},
        f"{key}.500.alpha1.s2.warm.no_pool": {"value": 1.0},
        "adapters.vllm.requests_s.500.alpha1.l32": {"value": 0.5},
        "adapters.flat.500.warm": {"value": 0.66},
    }
    write(tmp_path, "adapters_many.json", rows)
    draw_many(tmp_path, tmp_path)
    served, satisfied = drawn["adapters_many.png"].values()
    assert served == {
        "rank 8, in host memory": [3.0, 2.0],
        "ranks 8 to 64, in host memory, memory apart": [1.0],
        "vLLM l32": [0.5],
    }
    assert satisfied == {"rank 8, in host memory": [1.0, 0.9]}, "no panel for what no row has"


def test_the_ratio_curve_needs_two_points(tmp_path: Path, drawn: dict[str, dict[str, dict[str, list[float]]]]) -> None:
    one = {"adapters.ratio.ttft_p95_ms.10%": {"value": 90.0, "within_250_ms": 0.5}}
    write(tmp_path, "adapter_tiers.json", one)
    draw_ratio(tmp_path, tmp_path)
    assert not drawn
    write(tmp_path, "adapter_tiers.json", one | {"adapters.ratio.ttft_p95_ms.100%": {"value": 9, "within_250_ms": 1}})
    draw_ratio(tmp_path, tmp_path)
    assert drawn["adapters_ratio.png"]["p95 TTFT, ms"] == {"p95": [90.0, 9.0]}


def test_totals_of_steps_are_of_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    page = """# HELP coserve_generation_steps_total Generation steps
coserve_generation_steps_total{beside_training="false",kind="decode"} 6.0
coserve_generation_steps_total{beside_training="true",kind="prefill"} 2.0
coserve_generation_step_seconds_total{beside_training="false",kind="decode"} 0.25
coserve_step_adapters_total 40.0
"""
    monkeypatch.setattr(fleet, "get", lambda url: page.encode())
    assert fleet.step_totals("http://here") == (8.0, 0.25, 40.0)
