"""Tensor parallelism's benchmark: ranks at equal parameters, composed loads and keys, and a tiny run on two
processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bdlora.loads import loads_of, speedups, table_2
from benchmarks.bdlora.plan import PARTS, SHAPES, Plan, Variant, bd_rank
from benchmarks.bdlora.ranks import RankFailed, RankProcesses
from benchmarks.bdlora.results import key_of, keys
from benchmarks.common.llama import llama_config
from coserve.model.parallel.families.partitions import plan_of
from tests.support.examples import marks_on_days, on_days


def test_ranks_at_equal_parameters() -> None:
    def ranks(blocks: int) -> list[int]:
        return [bd_rank(Variant("8b", "bd", rank), SHAPES["8b"], blocks) for rank in (16, 64, 128, 256)]

    assert ranks(2) == [26, 104, 208, 416]
    assert ranks(8) == [48, 200, 400, 800]
    assert bd_rank(Variant("8b", "bd2", 64), SHAPES["8b"], 8) == 128


def test_every_row_has_a_key_of_its_own_and_every_shape_can_be_divided() -> None:
    for size in (2, 4, 8):
        assert all(plan_of(llama_config(shape), size) for shape in SHAPES.values())
        items = [item for part in PARTS for item in Plan(size).items(part) if item.what != "drop"]
        by_key = {key_of(item, size): (item.what, item.model, item.variant) for item in items}
        assert all(by_key[key_of(item, size)] == (item.what, item.model, item.variant) for item in items)
        assert len(by_key) > 400


def row(what: str, value: float, strategy: str = "base", rank: int = 0, **more: object) -> dict[str, Any]:
    about = {"what": what, "shape": "8b", "tp": 2, "strategy": strategy, "lora_rank": rank, "date": "today"}
    return {"value": value, **about, **more}


def test_loads_are_composed_of_their_parts_where_they_were_not_run() -> None:
    run = {"prefill_ms": [5.0], "decode_ms": {"median": 2.0}}
    rows = {
        "bdlora.8b.tp2.tok_s.bd.r64.b1.16x512": row("generate", 500.0, "bd", 64, **run),
        "bdlora.8b.tp2.tok_s.nfs.r64.b1.16x512": row("generate", 400.0, "nfs", 64, **run),
        "bdlora.8b.tp2.decode_ms.base.b64.c1088": row("decode", 8.0),
        "bdlora.8b.tp2.prefill_ms.base.1024": row("prefill", 20.0),
        "bdlora.8b.tp2.build_s": {"value": 3.0},
    }
    loads = loads_of(rows)
    (composed,) = [one for one in loads if not one.measured]
    assert composed.load.name == "b64.1024x128"
    assert composed.e2e_s == pytest.approx((64 * 20.0 + 127 * 8.0) / 1e3)
    (speedup,) = speedups(loads)
    assert speedup.ratio == pytest.approx(1.25)
    assert keys(rows, loads, {})["bd.speedup_vs_nfs.tp2"][0] == pytest.approx(1.25)
    assert keys(rows, loads, {})["bd.min_speedup.tp2"][0] == pytest.approx(1.25)
    assert "500.0" in table_2(loads)


def test_keys_of_retention_and_of_one_gpu() -> None:
    rows = {
        "bdlora.8b.tp2.decode_ms.base.b1.c272": row("decode", 2.5),
        "bdlora.8b.tp1of2.decode_ms.base.b1.c272": row("decode", 4.5) | {"tp": 1},
        "bdlora.8b.tp2.decode_ms.bd.r128.b1.c272": row("decode", 2.7, "bd", 128),
        "bdlora.8b.tp2.decode_ms.base.b64.c272": row("decode", 4.0),
        "bdlora.8b.tp2.decode_ms.bd.r128.b64.c272": row("decode", 5.0, "bd", 128),
        "bdlora.8b.tp2.train_s": row("train", 0.2),
        "bdlora.8b.tp1of2.train_s": row("train", 0.3) | {"tp": 1},
    }
    for one in rows.values():
        one["run"] = "2026-01-01"
    found = {key: value for key, (value, *_) in keys(rows, loads_of(rows), {}).items()}
    assert found["bd.retention.tp2"] == pytest.approx(0.8)
    assert found["tp.decode_speedup.tp2"] == pytest.approx(1.8)
    assert found["tp.decode_tok_s.tp2"] == pytest.approx(400.0)
    assert found["tp.finetune_speedup.tp2"] == pytest.approx(1.5)
    assert "tp.prefill_speedup.tp2" not in found
    rows["bdlora.8b.tp1of2.train_s"]["run"] = "2026-01-02"
    assert "tp.finetune_speedup.tp2" not in keys(rows, loads_of(rows), {}), "of two runs"


def test_runs_on_different_gpus_are_not_compared() -> None:
    names = ("8b.tp{}.decode_ms.base.b1.c272", "70b.tp{}.decode_ms.base.b1.c272", "8b.tp{}.train_s")
    rows = {f"bdlora.{name.format(tp)}": row("", 5.0 / tp) | {"run": str(tp)} for tp in (2, 4, 8) for name in names}
    found = keys(rows, [], {"2": "H100", "4": "H200", "8": "H200"})
    compared = {key: (value, target and target.value) for key, (value, target, *_) in found.items() if "_8" in key}
    assert compared == {
        "tp.decode_speedup.tp4_8.8b": (2.0, None),
        "tp.decode_speedup.tp4_8.70b": (2.0, 1.45),
        "tp.finetune_speedup.tp4_8": (2.0, 1.6),
    }
    assert not any("tp2_4" in key for key in found)


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(2, marks=marks_on_days(1)),
        pytest.param(4, marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param(8, marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_a_tiny_run_writes_rows_loads_and_figures(size: int, tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "benchmarks.bdlora.measure", "--tiny", "--tp", str(size), "--ranks", "16"),
        *("--only", "target,one_gpu", "--out", str(tmp_path)),
    ]
    eager = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}  # it takes minutes
    done = subprocess.run(command, env=eager, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "bdlora.json").read_text())["rows"]
    calls = {
        name: rows[f"bdlora.tiny.tp{size}.tok_s.{name}.b1.8x6"]["traffic"] for name in ("base", "bd.r16", "slora.r16")
    }
    assert calls["bd.r16"] == calls["base"], "bd sends nothing more than the base"
    assert calls["slora.r16"]["all_gather.calls"] > calls["base"]["all_gather.calls"]
    loads = json.loads((tmp_path / "bdlora_loads.json").read_text())
    assert {load["variant"] for load in loads} == set(calls) | {"nfs.r16"} | ({"bd2.r16"} if size == 8 else set())
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".md", ".png"}


@on_days(2)
def test_a_rank_that_fails_or_hangs_ends_the_run(tmp_path: Path) -> None:
    with RankProcesses(1, tmp_path, tiny=True) as ranks, pytest.raises(RankFailed, match="no answer of ranks"):
        ranks.call("hardware", limit=0.0)
    with RankProcesses(1, tmp_path, tiny=True) as ranks, pytest.raises(RankFailed, match="KeyError: 'nothing'"):
        ranks.call("build", "nothing", limit=120.0)
