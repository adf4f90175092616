"""Starting a job on a thread: it can be cancelled, leaves nothing behind, and prepares what belongs to many rows
ahead."""

from __future__ import annotations

from pathlib import Path

import pytest

from coserve.core.cancellation import Cancellation, Cancelled
from coserve.core.link.jobs import JobSucceeded
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.passes.training_pass import TrainingPass
from coserve.model.base import Base
from tests.support.finetuning import Bench, alive, job_spec, metrics_of, random_corpus

CORPUS = random_corpus()


def test_a_cancelled_start_is_not_finished(base: Base, tmp_path: Path) -> None:
    bench, cancellation = Bench(base, tmp_path), Cancellation()
    spec = bench.place(CORPUS, job_spec(CORPUS))
    cancellation.cancel()
    with pytest.raises(Cancelled):
        bench.trainer.load(spec, cancellation)
    bench.start(spec)


def test_what_belongs_to_many_rows_is_prepared_between_two_steps(base: Base, tmp_path: Path) -> None:
    few, many = Bench(base, tmp_path / "few"), Bench(base, tmp_path / "many", rows_on_tick=1)
    changes = {"steps": 6, "batch_tokens": 1000, "validation_split": 0.3, "eval_steps": 2}
    expected = metrics_of(few.train(few.place(CORPUS, job_spec(CORPUS, **changes))))
    spec = many.place(CORPUS, job_spec(CORPUS, **changes))
    many.start(spec)
    messages, prepared = [], []
    while not messages or not isinstance(messages[-1], JobSucceeded):
        messages += many.advance(spec.id, 3)
        if (prepare := many.trainer.preparation(spec.id)) is not None:
            prepared.append(len(metrics_of(messages)))
            prepare(Cancellation())
            assert many.trainer.preparation(spec.id) is None
    assert metrics_of(messages) == expected
    assert prepared == [1, 2, 3, 4, 5], "each step is an epoch; the first was prepared by the start"


def test_a_job_that_is_dropped_leaves_no_memory(base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: TrainingPass, micro_steps: int | None) -> None:
        raise ZeroDivisionError

    bench = Bench(base, tmp_path)
    spec = bench.place(CORPUS, job_spec(CORPUS))
    before = len(alive(AdapterOptimizer))
    bench.start(spec)
    bench.advance(spec.id, 2)
    assert len(alive(AdapterOptimizer)) == before + 1
    monkeypatch.setattr(TrainingPass, "advance", broken)
    with pytest.raises(ZeroDivisionError):
        bench.advance(spec.id, 2)
    bench.trainer.drop(spec.id)
    assert len(alive(AdapterOptimizer)) == before
