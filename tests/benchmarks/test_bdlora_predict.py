"""The model that predicts decode on more GPUs reproduces what it was fitted to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bdlora.plan import SHAPES, STRATEGIES
from benchmarks.bdlora.predict import RANKS, fit, held, predictions

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
ROWS: dict[str, dict[str, Any]] = json.loads((RESULTS / "bdlora_da60234.json").read_text())["rows"]
SHAPE = SHAPES["8b"]


def test_a_gpu_holds_the_parameters_that_were_counted() -> None:
    for strategy in STRATEGIES:
        for rank in RANKS:
            row = ROWS[f"bdlora.8b.tp2.tok_s.{strategy}.r{rank}.b1.16x512"]
            assert held(strategy, rank, SHAPE, 2) == row["adapter_parameters_held"]


def test_steps_on_one_and_two_gpus_are_those_measured() -> None:
    model = fit(ROWS)
    one = model.per_parameter * model_weights() + model.fixed
    assert one == pytest.approx(ROWS["bdlora.8b.tp1of2.decode_ms.base.b1.c272"]["value"])
    two = model.step(None, 0, SHAPE, 2, spread=1.0)
    assert two == pytest.approx(ROWS["bdlora.8b.tp2.decode_ms.base.b1.c272"]["value"])
    for strategy in STRATEGIES:
        for rank in RANKS:
            measured = ROWS[f"bdlora.8b.tp2.tok_s.{strategy}.r{rank}.b1.16x512"]["decode_ms"]["median"]
            assert model.step(strategy, rank, SHAPE, 2, spread=0.0) == pytest.approx(measured, rel=0.01)


def model_weights() -> int:
    layer, head = SHAPE.parameters()
    return 32 * layer + head


def test_slower_messages_make_fully_sharded_adapters_slower_and_more_gpus_worth_less() -> None:
    found = predictions(fit(ROWS))
    assert all(low <= high for low, high, _ in found.values())
    low, high, _ = found["bd.predicted.speedup_vs_slora.tp4.8b"]
    assert low < high
    both = [found[f"tp.predicted.decode_speedup.tp{few}_{2 * few}.8b"] for few in (2, 4)]
    assert both[1][0] < both[0][0] < 2
