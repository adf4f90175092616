"""How a job starts on a thread, and what the outcomes of its slices and evaluations mean for it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from coserve.core.cancellation import Cancellation, Cancelled
from coserve.core.errors import JobOutOfMemory, NonFiniteLoss
from coserve.core.link.jobs import JobNote, JobSucceeded
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.passes.training_pass import TrainingPass
from coserve.finetune.sessions.trainee import PEER_FAILED, Outcome, Verdict, judge
from coserve.model.base import Base
from coserve.model.lora import LoraWeights
from tests.support.finetuning import Bench, alive, job_spec, metrics_of, random_corpus, tiny_base

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


MEMORY = JobOutOfMemory.code
DONE, LEFT, FULL = Outcome(), Outcome(PEER_FAILED), Outcome(MEMORY, "no memory")
UPDATED = Outcome(updated=True)


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ([DONE, DONE], Verdict()),
        ([DONE, FULL], Verdict(MEMORY, "no memory", retry=True)),
        ([LEFT, FULL, LEFT, FULL], Verdict(MEMORY, "no memory", retry=True)),
        ([UPDATED, FULL], Verdict(MEMORY, "no memory")),
        ([UPDATED, UPDATED], Verdict()),
        ([FULL, Outcome("storage", "disk full")], Verdict(MEMORY, "no memory")),
        ([LEFT, Outcome("storage", "disk full")], Verdict("storage", "disk full")),
        ([Outcome(NonFiniteLoss.code, "nan")] * 2, Verdict(NonFiniteLoss.code, "nan")),
    ],
)
def test_a_job_tries_again_only_where_all_ranks_can(outcomes: list[Outcome], verdict: Verdict) -> None:
    assert judge(outcomes) == verdict


def no_memory(weights: LoraWeights) -> LoraWeights:
    raise MemoryError


@pytest.mark.parametrize("evaluated", [True, False])
def test_without_memory_for_its_copy_the_job_fails(evaluated: bool, tmp_path: Path) -> None:
    bench, corpus = Bench(tiny_base("llama"), tmp_path), random_corpus(0, (5, 4))
    options = {"steps": 1} | ({} if evaluated else {"sample_prompts": ["x"], "sample_steps": 1})
    spec = bench.place(corpus, msgspec.structs.replace(job_spec(corpus, "job", **options), evaluated=evaluated))
    bench.start(spec)
    while not bench.trainer.finished(spec.id):
        bench.trainer.advance(spec.id, None)
    assert bench.trainer.snapshot_due(spec.id)
    bench.store.host_copy = no_memory  # type: ignore[method-assign]
    take = bench.trainer.snapshot(spec.id)
    if evaluated:
        with pytest.raises(JobOutOfMemory, match="before it is published"):
            take()
    else:
        assert isinstance(take()(), JobNote), "samples alone are left out"
