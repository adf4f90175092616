"""Figure 5.1: its fine-tuning by the daemon's trainer, and its keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.ets.figure_5_1_report import flatness, over_grouped
from benchmarks.ets.figure_5_1_trainer import trained_jobs
from coserve.model.base import wrap_base
from tests.support.tiny_models import tiny_model


@pytest.mark.parametrize(("batch", "jobs"), [(4, 1), (4, 2), (2, 3), (1, 2)])
def test_a_batch_has_rows_of_as_many_jobs_as_fit(batch: int, jobs: int) -> None:
    torch.manual_seed(0)
    base = wrap_base(tiny_model("gpt2"), name="gpt2")
    with trained_jobs(base, "grouped", length=8, batch=batch, ranks=[4, 8, 16][:jobs]) as running:
        assert [running.train(run) for run in range(6)] == [8 * batch] * 6
        assert running.jobs_of_batches == {min(jobs, batch)}


def row(task: str, way: str, adapters: int, value: float, batch: int = 16) -> dict[str, Any]:
    return {"task": task, "way": way, "batch": batch, "adapters": adapters, "value": value}


ROWS = [
    row("inference", "segmented+graphs", 1, 100.0),
    row("inference", "segmented+graphs", 64, 95.0),
    row("finetuning", "segmented", 1, 100.0),
    row("finetuning", "segmented", 64, 80.0),
    row("inference", "block_sparse", 1, 40.0),
    row("inference", "grouped", 1, 100.0),
    row("inference", "block_sparse", 24, 90.0, batch=64),
    row("inference", "grouped", 24, 100.0, batch=64),
    row("finetuning", "block_sparse", 64, 55.0),
    row("finetuning", "grouped", 64, 50.0),
]


def test_flatness_is_of_the_trainer_where_it_was_measured() -> None:
    assert flatness(ROWS)["kernels.flatness.a64_vs_a1"][0] == 0.8
    trainer = [row("finetuning", "segmented+trainer", 1, 100.0), row("finetuning", "segmented+trainer", 64, 90.0)]
    assert flatness([*ROWS, *trainer])["kernels.flatness.a64_vs_a1"][0] == 0.9


def test_block_sparse_over_grouped() -> None:
    found = {key: value for key, (value, _) in over_grouped(ROWS).items()}
    assert found == {
        "kernels.figure_5_1.block_sparse_over_grouped.inference.max": 0.9,
        "kernels.figure_5_1.block_sparse_over_grouped.finetuning.a64": 1.1,
    }
