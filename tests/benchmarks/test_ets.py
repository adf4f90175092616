"""Loads, keys and figures of the ETS paper's tables, without a daemon."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ets.loads import PAPER, POLICIES, TINY, Load, cells, load_trace_of, system
from benchmarks.ets.report import FILE, held, keys, publish
from coserve.config import Config


def test_the_load_is_that_of_table_5_1() -> None:
    """Section 5.2.1: a prompt each 0.1 s, and each 20 s 512 rows for 32 adapters of rank 32; batches as in section
    5.2.2."""
    (load,) = (cell.load for cell in cells(tiny=False) if cell.part == "table")
    trace = load_trace_of(load, PAPER)
    assert (load.rate, load.rows, load.period) == (10.0, 512, 20.0)
    assert [prompt.at for prompt in trace.prompts][:3] == pytest.approx([0.0, 0.1, 0.2])
    assert len(trace.prompts) == 600 and len({prompt.adapter for prompt in trace.prompts}) == 32
    assert [(job.at, len(job.rows)) for job in trace.finetunes] == [(0.0, 512), (20.0, 512), (40.0, 512)]
    assert (PAPER.batch_requests, PAPER.delay, PAPER.batch_rows, PAPER.rank) == (64, 5.0, 32, 32)


def test_rows_of_a_burst_are_one_job_or_one_for_each_adapter() -> None:
    load = Load(20.0, rows=64)
    (whole,) = load_trace_of(load, PAPER).finetunes
    parts = load_trace_of(Load(20.0, rows=64, by_adapter=True), PAPER).finetunes
    assert len(whole.rows) == sum(len(part.rows) for part in parts) == 64
    assert len(parts) == len({part.adapter for part in parts}) > 16
    steps = [
        load_trace_of(each, PAPER).scenario.training.batch_tokens for each in (load, replace(load, by_adapter=True))
    ]
    assert steps == [32 * 480, 8 * 480], "steps of four jobs make up a batch of 32 rows"


def test_other_loads_leave_the_prompts_alone() -> None:
    """Policies and sizes of fine-tuning requests are compared under the same prompts."""
    few, many = (load_trace_of(Load(5.0, rows=rows), TINY).prompts for rows in (2, 4))
    assert few == many


def test_the_settings_of_a_policy_are_settings_of_the_daemon() -> None:
    for policy in POLICIES:
        for backend in ("segmented", "block_sparse"):
            Config(**system(policy, backend, (1.0, 0.1)).settings("cuda"))  # type: ignore[arg-type]
    assert system("ts20", "block_sparse", (1.0, 0.1)).settings("cuda")["ts_n"] == 20
    late = system("ets+2.5", "segmented", (1.0, 0.1))
    assert (late.name, late.policy, late.settings("cuda")["inference_delay"]) == ("ets+2.5", "ets", 2.5)


def row(policy: str, part: str, factor: float, latency: float, in_10s: float, tok_s: float) -> dict[str, Any]:
    load = {"rate": 10.0 * factor, "rows": int(512 * factor)}
    found = {"load": load, "part": part, "system": {"name": policy}, "latency_mean_s": latency, "date": "2026-11-22"}
    return found | {"in_1s": 1.0, "in_10s": in_10s, "in_60s": 1.0, "finetune_tok_s": tok_s}


ROWS = {
    "table52.ets": row("ets", "table", 1, 3.0, 1.0, 900.0),
    "table52.ts5": row("ts5", "table", 1, 4.0, 0.98, 1000.0),
    "table52.slack": row("slack", "table", 1, 0.2, 1.0, 990.0),
    "x4.slack": row("slack", "rates", 4, 0.3, 0.99, 4000.0),
    "x8.slack": row("slack", "rates", 8, 9.0, 0.5, 7000.0),
    "x16.slack": row("slack", "rates", 16, 9.0, 1.0, 7000.0),
    "x4.ts5": row("ts5", "rates", 4, 40.0, 0.1, 4000.0),
}


def test_keys() -> None:
    found = {key: value for key, (value, _, _, _) in keys(ROWS).items()}
    assert found["ets.table52.ets.latency_mean_s"] == 3.0 and found["ets.table52.slack.in_1s"] == 1.0
    assert found["ets.table52.slack_over_ets.latency"] == pytest.approx(0.2 / 3.0, abs=1e-4)
    assert found["ets.table52.slack_over_ts.finetune"] == 0.99
    assert found["ets.held_load.slack"] == 4.0, "a load beyond one that broke does not count"
    assert found["ets.held_load.ts5"] == 0.0 and "ets.held_load.ets" not in found


def test_answers_and_delays_have_keys_of_their_own() -> None:
    (load,) = (cell.load for cell in cells(tiny=False) if cell.part == "answers")
    assert {prompt.max_tokens for prompt in load_trace_of(load, PAPER).prompts} == {20}
    rows = {"table52.ets+1": ROWS["table52.ets"], "answers20.block_sparse.ets": ROWS["table52.ets"]}
    found = keys(rows)
    assert (
        found["ets.table52.ets+1.latency_mean_s"][0] == found["ets.answers20.block_sparse.ets.latency_mean_s"][0] == 3
    )


def test_one_policy_alone_has_no_ratio() -> None:
    alone = keys({"table52.slack": ROWS["table52.slack"]})
    assert not any("over" in key for key in alone) and not held({"table52.slack": ROWS["table52.slack"]}, "segmented")


def test_figures_are_drawn_and_keys_published(tmp_path: Path) -> None:
    other = row("block_sparse.ets", "table", 1, 5.0, 1.0, 800.0)
    record = {"rows": ROWS | {"table52.block_sparse.ets": other}, "runs": {"a": {"hardware": "a GPU"}}}
    (tmp_path / FILE).write_text(json.dumps(record))
    publish(tmp_path, tmp_path / "figure.png")
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["figure.png", "figure_block_sparse.png"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["ets.table52.block_sparse.ets.latency_mean_s"]["value"] == 5.0
    assert summary["ets.table52.slack.in_1s"]["target"] == ">= 1"
