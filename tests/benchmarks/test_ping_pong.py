"""The arithmetic of the ping-pong benchmark: bytes of a layer, and what is left beside the base's products."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.common.results import Results
from benchmarks.moe.ping_pong import FULL, Report, beside_us, exchanges, table


def test_a_layer_sends_what_the_planner_counts() -> None:
    there, back = FULL.token_bytes()
    sent = exchanges(FULL, 5)
    assert 2 * sum(one for one, _ in sent) == 5 * there and 2 * sum(other for _, other in sent) == 5 * back


def test_products_read_each_chosen_expert_once() -> None:
    up, down = beside_us(FULL, 1 << 20, 1e12)  # so many tokens choose all experts
    assert down == pytest.approx(128 * 2 * 2048 * 768 / 1e6) and up == 2 * down


def test_a_row_has_the_fastest_way_and_what_its_exchanges_leave(tmp_path: Path) -> None:
    results = Results(tmp_path, "ping_pong.json", script="x.y", hardware="none", seed=0, revision="abc", settings={})
    report = Report(results, FULL, pairs=1, bandwidth=1e15)  # products take almost nothing
    report.add("send", 4, [30.0, 20.0])
    report.add("push", 4, [12.0, 8.0])
    report.add("copy", 8, "RuntimeError: it cannot")
    rows = json.loads((tmp_path / "ping_pong.json").read_text())["rows"]
    row = rows["infini.step_ms.t4"]
    assert row["value"] == pytest.approx(48 * 20e-3) and row["way"] == "push"
    assert row["beside_ms"] == pytest.approx(row["value"], rel=0.05) and row["exchange_us"]["send"] == [30.0, 20.0]
    assert rows["infini.failed.copy"]["error"] == "RuntimeError: it cannot"
    assert table(tmp_path / "ping_pong.json").splitlines()[2].startswith("| 4 | 180,224 | push | 12.0 µs, 8.0 µs |")
