"""BD-LoRA's ranks at equal parameters, the choice of a rate, and the difference from LoRA."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.bdlora.quality import (
    FINAL,
    TUNING,
    Case,
    Comparison,
    HeldOutPlan,
    Scale,
    best_rate,
    compare,
    parameters,
    read_corpus,
    settings_of,
)
from coserve.core.training.settings import TrainingSettings
from coserve.core.types import BaseSpec, LoraSettings, SiteSpec
from tests.support.records import make_base_spec


def mlp(hidden: int, inner: int) -> BaseSpec:
    sites = {"up_proj": SiteSpec(hidden, inner, 0), "down_proj": SiteSpec(inner, hidden, 0)}
    return make_base_spec(sites, hidden=hidden)


@pytest.mark.parametrize(("kind", "blocks"), [("bd2", 2), ("bd4", 4)])
def test_the_rank_of_an_mlp_is_the_papers(kind: str, blocks: int) -> None:
    base = mlp(4096, 14336)
    settings = settings_of(Case(FINAL, kind, 64, 1e-3, 0), base)
    wanted = 64 * (4096 + 14336) / (4096 + 14336 / blocks)
    assert abs(settings.r - wanted) <= blocks / 2 and settings.r % blocks == 0
    assert parameters(settings, base) == pytest.approx(parameters(LoraSettings(r=64), base), rel=0.03)
    # rsLoRA's scaling of a block of rank r/N with an alpha of 16.
    assert settings.alpha is not None
    assert settings.alpha / math.sqrt(settings.r) == pytest.approx(16 / math.sqrt(settings.r / blocks))


def row(part: str, kind: str, rank: int, rate: float, seed: int, value: float) -> dict[str, Any]:
    case = {"part": part, "kind": kind, "of_rank": rank, "rate": rate, "seed": seed}
    return {"case": case, "value": value, "rank": rank, "parameters": 10 * rank}


def test_the_rate_with_the_lowest_mean_is_taken() -> None:
    scale = Scale(rates=(1e-3, 2e-3))
    found = [("lora", 8, 1e-3, 3.0), ("lora", 32, 1e-3, 3.0), ("lora", 8, 2e-3, 2.0), ("lora", 32, 2e-3, 3.5)]
    rows = [row(TUNING, kind, rank, rate, 100, value) for kind, rank, rate, value in found]
    rows += [row(TUNING, "bd2", 8, rate, 100, value) for rate, value in ((1e-3, 1.0), (2e-3, 4.0))]
    assert (best_rate(rows, "lora", scale), best_rate(rows, "bd2", scale)) == (2e-3, 1e-3)


def test_differences_are_seed_by_seed() -> None:
    rows = [
        row(FINAL, kind, 8, 1e-3, seed, value + seed)
        for kind, value in (("lora", 2.0), ("bd2", 2.1), ("bd4", 1.7))
        for seed in (0, 1)
    ]
    found = compare(rows)
    assert isinstance(found, Comparison)
    assert (found.delta, found.delta_by_seed) == (-0.1, {0: -0.1, 1: -0.1})
    assert found.noise == pytest.approx(math.sqrt(0.5), abs=1e-4)
    cells = {cell["kind"]: (cell["mean"], cell["delta"], cell["delta_std"]) for cell in found.cells}
    assert cells == {"lora": (2.5, 0.0, 0.0), "bd2": (2.6, 0.1, 0.0), "bd4": (2.2, -0.3, 0.0)}


def test_no_seed_trains_on_a_row_that_is_held_out() -> None:
    corpus, held = read_corpus()
    for seed in (0, 1):
        plan = HeldOutPlan(corpus, held, TrainingSettings(epochs=1, seed=seed))
        trained = {i for step in range(plan.total_steps) for rows in plan.step(step).micro_batches for i in rows}
        assert trained == set(range(corpus.rows - held))
        assert plan.validation() == (tuple(range(corpus.rows - held, corpus.rows)),)
