"""Figure 5.1: its fine-tuning by the daemon's trainer, its keys, and kernels that overlap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.traces import Kernel, busy
from benchmarks.ets.figure_5_1_report import flatness, over_grouped
from benchmarks.ets.figure_5_1_trainer import Jobs
from coserve.model.base import wrap_base
from tests.support.tiny_models import tiny_model


@pytest.mark.parametrize(("batch", "jobs"), [(4, 1), (4, 2), (2, 3), (1, 2)])
def test_a_batch_has_rows_of_as_many_jobs_as_fit(batch: int, jobs: int) -> None:
    torch.manual_seed(0)
    base = wrap_base(tiny_model("gpt2"), name="gpt2")
    with Jobs(base, "grouped", length=8, batch=batch, ranks=[4, 8, 16][:jobs]) as running:
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


def test_side_by_side_nothing_counts_twice() -> None:
    """As products, shrinks and expands overlap in a decode step."""
    step = [
        *(Kernel("norm", 0.0, 2.0), Kernel("decode", 1.0, 7.0), Kernel("project", 6.0, 12.0)),
        *(Kernel("shrink", 8.0, 11.0), Kernel("expand", 9.0, 14.0), Kernel("decode", 15.0, 20.0)),
        *(Kernel("norm", 19.0, 22.0), Kernel("decode", 23.0, 24.0)),
    ]
    assert busy(step) == 22.0
    assert busy([]) == 0.0


spans = st.tuples(st.integers(0, 50), st.integers(1, 20)).map(lambda at: Kernel("k", at[0], at[0] + at[1]))


@given(st.lists(spans, min_size=1))
def test_they_add_up(kernels: list[Kernel]) -> None:
    covered = {tick for kernel in kernels for tick in range(int(kernel.start), int(kernel.end))}
    assert busy(kernels) == pytest.approx(len(covered))
