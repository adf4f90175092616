"""Rows of several jobs in one forward: each job learns what it learns alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from coserve.core.link.jobs import JobCheckpoint, JobFailed, JobNote, JobSucceeded
from coserve.core.link.link import FromEngine
from coserve.core.names import ADAPTER_WEIGHTS
from coserve.core.training.jobs import JobSpec, Teacher
from coserve.core.training.micro_step import MicroStep
from coserve.core.training.settings import Schedule
from coserve.core.types import AdapterRef
from coserve.data.corpus.tokenized import Corpus
from coserve.finetune.memory_limits import BatchLimits, Size, companions
from coserve.finetune.micro_batch import MicroBatchRunner
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.passes import training_pass
from coserve.finetune.passes.training_pass import TrainingPass
from coserve.kernels.lora.interface import LoraBackend
from coserve.lora.files.record import record_adapter
from coserve.model.base import Base
from coserve.model.layers import LayerCut
from coserve.queues.finetune import JobQueue
from tests.support.examples import by_day
from tests.support.finetuning import Bench, alive, job_spec, metrics_of, random_corpus, tiny_base, train_together
from tests.support.lora_backends import BLOCK_SPARSE, GROUPED, NAIVE, REFERENCE, SEGMENTED
from tests.support.memory_faults import out_of_memory_at

TOLERANCE = 1e-6
"""Of a job's losses, alone and in company, in fp32."""
Jobs = Sequence[tuple[Corpus, JobSpec]]


@cache
def base() -> Base:
    return tiny_base("llama")


def job(number: int, **changes: object) -> tuple[Corpus, JobSpec]:
    corpus = random_corpus(number, [(9, 5, 12, 3, 7, 8), (4, 4, 6, 17), (11, 2, 2, 2, 5, 9, 3), (6, 8)][number % 4])
    return corpus, job_spec(corpus, f"job-{number}", adapter=f"a{number}", **{"seed": number, **changes})


VARIED: Jobs = (
    job(0, dropout=0.3, schedule=Schedule.COSINE, warmup_steps=2, steps=5),
    job(1, r=2, targets=("q_proj", "down_proj"), max_grad_norm=0.01, learning_rate=0.003, neftune_alpha=5.0),
    job(
        2, r=16, alpha=4.0, rslora=True, weight_decay=0.1, steps=6, batch_tokens=40, validation_split=0.3, eval_steps=2
    ),
    job(3, r=1, targets=("v_proj",), dropout=0.5, max_grad_norm=0.0, beta1=0.5, batch_tokens=8, neftune_alpha=15.0),
)
"""Different in everything that a job may choose."""


class Alone:
    """Jobs that were each trained by itself, on batches of the same limits: each once, for all tests."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._benches, self._found = dict[str, Bench](), dict[str, list[FromEngine]]()

    def train(self, jobs: Jobs, **options: object) -> list[list[FromEngine]]:
        """The messages of each."""
        return [self._train(corpus, spec, **options) for corpus, spec in jobs]

    def weights(self, spec: JobSpec, **options: object) -> dict[str, torch.Tensor]:
        """Those that it published."""
        return published(self._benches[f"{spec} {options}"], spec)

    def _train(self, corpus: Corpus, spec: JobSpec, **options: object) -> list[FromEngine]:
        name = f"{spec} {options}"
        if name not in self._found:
            self._benches[name] = bench = Bench(base(), self._root / str(len(self._found)), **options)
            self._found[name] = bench.train(bench.place(corpus, spec))
        return self._found[name]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(tmp_path_factory.mktemp("alone"))


def published(bench: Bench, spec: JobSpec) -> dict[str, torch.Tensor]:
    return load_file(bench.folder.adapter(AdapterRef(spec.adapter, spec.version)) / ADAPTER_WEIGHTS)


def started(jobs: Jobs, root: Path, **options: object) -> Bench:
    bench = Bench(base(), root / "together", **options)
    for corpus, spec in jobs:
        bench.start(bench.place(corpus, spec))
    return bench


def assert_same_curve(found: Sequence[FromEngine], expected: Sequence[FromEngine]) -> None:
    ours, theirs = metrics_of(found), metrics_of(expected)
    assert [(m.step, m.epoch, m.learning_rate, m.tokens, m.target_tokens) for m in ours] == [
        (m.step, m.epoch, m.learning_rate, m.tokens, m.target_tokens) for m in theirs
    ]
    for one, other in zip(ours, theirs, strict=True):
        assert one.loss == pytest.approx(other.loss, abs=TOLERANCE)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
        assert (one.valid_loss is None) == (other.valid_loss is None)
        assert one.valid_loss is None or one.valid_loss == pytest.approx(other.valid_loss, abs=TOLERANCE)


def assert_same_adapter(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("backend", "micro_steps"), [(GROUPED, 3), pytest.param(REFERENCE, None, marks=pytest.mark.slow)]
)
def test_a_jobs_curve_is_the_same_alone_and_in_company(
    alone: Alone, tmp_path: Path, backend: LoraBackend, micro_steps: int | None
) -> None:
    expected = alone.train(VARIED, lora_backend=backend)
    bench = started(VARIED, tmp_path, lora_backend=backend)
    found = train_together(bench, [spec for _, spec in VARIED], micro_steps=micro_steps)
    for (_, spec), own in zip(VARIED, expected, strict=True):
        assert isinstance(found[spec.id][-1], JobSucceeded)
        assert_same_curve(found[spec.id], own)
        assert_same_adapter(published(bench, spec), alone.weights(spec, lora_backend=backend))
    batches = bench.trainer.batches
    assert batches.jobs > 1.5 * batches.count, "they did share batches"


FEW: Jobs = (
    job(0, steps=2, batch_tokens=12, targets=("q_proj", "k_proj")),
    job(1, steps=2, batch_tokens=12, r=19, targets=("q_proj", "o_proj")),
    job(2, steps=2, batch_tokens=12, r=3, targets=("v_proj", "q_proj"), dropout=0.2),
)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [BLOCK_SPARSE, SEGMENTED])
def test_the_kernels_train_mixed_batches(alone: Alone, tmp_path: Path, backend: LoraBackend) -> None:
    """In Triton's interpreter, where products are summed in another order in another company."""
    expected = alone.train(FEW)
    bench = started(FEW, tmp_path, lora_backend=backend)
    found = train_together(bench, [spec for _, spec in FEW])
    for (_, spec), own in zip(FEW, expected, strict=True):
        for one, other in zip(metrics_of(found[spec.id]), metrics_of(own), strict=True):
            assert one.loss == pytest.approx(other.loss, abs=1e-4)
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-3)
    assert bench.trainer.batches.jobs > 2 * bench.trainer.batches.count


def test_jobs_that_cannot_share_train_alone(tmp_path: Path) -> None:
    bench = Bench(base(), tmp_path)
    corpus, plain = job(0)
    bench.train(bench.place(corpus, plain))
    folder = bench.folder.adapter(AdapterRef("a0", 1))
    taught = Teacher(
        AdapterRef("a0", 1),
        record_adapter(folder, AdapterRef("a0", 1), base().spec, source="job", created_at=0.0).digests,
        4,
    )
    jobs = [job(1), job(2, bd_blocks=2), job(3), job(4, bd_blocks=2, r=8), job(5, teacher=taught)]
    for corpus, spec in jobs:
        bench.start(bench.place(corpus, spec))
    together = set[frozenset[str]]()

    def note(queue: JobQueue) -> None:
        together.add(frozenset(bench.trainer.trained))

    train_together(bench, [spec for _, spec in jobs], between=note)
    assert {frozenset({"job-1", "job-3"}), frozenset({"job-2", "job-4"}), frozenset({"job-5"})} <= together
    kind = {spec.id: (spec.lora.bd_blocks > 1, spec.teacher is not None) for _, spec in jobs}
    assert all(len({kind[id] for id in each}) == 1 for each in together)


def test_naive_trains_one_adapter_a_forward(tmp_path: Path) -> None:
    bench = started(VARIED[:2], tmp_path, lora_backend=NAIVE)
    train_together(bench, [spec for _, spec in VARIED[:2]])
    assert bench.trainer.batches.jobs == bench.trainer.batches.count


def test_evaluations_are_of_one_job(tmp_path: Path) -> None:
    jobs = [job(number, validation_split=0.3, eval_steps=1, steps=2) for number in (0, 1)]
    bench, seen = started(jobs, tmp_path), list[tuple[bool, int]]()

    def note(queue: JobQueue) -> None:
        for leader in queue.ready()[:1]:
            if bench.trainer.mid_batch(leader):
                evaluates = bench.trainer.next_micro_step(leader) in (MicroStep.EVALUATE, MicroStep.EVALUATE_HEAD)
                seen.append((evaluates, len(bench.trainer.trained)))

    train_together(bench, [spec for _, spec in jobs], micro_steps=1, between=note)
    assert {count for evaluates, count in seen if evaluates} == {1}
    assert 2 in {count for evaluates, count in seen if not evaluates}


def test_batches_are_counted_in_rows_too(tmp_path: Path) -> None:
    rows = list[int]()
    bench = started(VARIED, tmp_path, limits=BatchLimits(64, rows=3))

    def note(queue: JobQueue) -> None:
        rows.append(bench.trainer.batches.rows)

    train_together(bench, [spec for _, spec in VARIED], between=note)
    taken = {after - before for before, after in zip([0, *rows], rows, strict=False)}
    assert max(taken) == 3


def test_no_more_jobs_join_than_the_slice_allows(tmp_path: Path) -> None:
    bench = started(VARIED[:3], tmp_path)
    ids = [spec.id for _, spec in VARIED[:3]]
    for limit, jobs in ((1, 1), (None, 3)):
        bench.trainer.advance(ids[0], None, ids, limit)
        assert len(bench.trainer.trained) == jobs


def test_each_that_still_fits_joins_in_the_order_of_turns() -> None:
    others = [("a", Size(30, 2)), ("b", Size(50, 1)), ("c", Size(20, 4)), ("d", Size(10, 1))]
    assert companions(Size(20, 1), others, BatchLimits(80)) == ["a", "c", "d"]
    assert companions(Size(20, 1), others, BatchLimits(80, rows=4)) == ["a", "d"]
    assert companions(Size(90, 1), others, BatchLimits(80)) == []


@pytest.mark.parametrize("at", by_day([1, 2, 4, 7], 7))
def test_one_that_is_cancelled_or_paused_leaves_the_others_as_they_are(alone: Alone, tmp_path: Path, at: int) -> None:
    """At any micro-step of a shared batch; the paused one resumes from its last finished step."""
    expected = alone.train(VARIED)
    bench, specs = started(VARIED, tmp_path), [spec for _, spec in VARIED]
    cancelled, paused, left = specs[0].id, specs[2].id, list[FromEngine | None]()
    shared = 0

    def leave(queue: JobQueue) -> None:
        nonlocal shared
        shared += {cancelled, paused} <= set(bench.trainer.trained) and bench.trainer.mid_batch(cancelled)
        if shared == at and not left:
            bench.trainer.abandon(cancelled)
            bench.trainer.drop(cancelled)
            assert bench.trainer.holds_memory_of(cancelled), "the others compute with its tensors"
            left.append(bench.save(paused))
            bench.trainer.drop(paused)
            queue.remove(cancelled)
            queue.remove(paused)

    found = train_together(bench, specs, micro_steps=2, between=leave)
    assert len(left) == 1 and not bench.trainer.holds_memory_of(cancelled)
    for spec, own in zip(specs, expected, strict=True):
        if spec.id not in (cancelled, paused):
            assert_same_curve(found[spec.id], own)
            assert_same_adapter(published(bench, spec), alone.weights(spec))
    resumed = bench.start(specs[2]).resumed_from
    assert resumed == len(metrics_of(found[paused]))
    again = train_together(bench, specs[2:3])[paused]
    assert_same_curve([*found[paused], *again], expected[2])


def test_jobs_that_shared_batches_resume_after_a_kill(alone: Alone, tmp_path: Path) -> None:
    jobs = [job(0, steps=6, checkpoint_steps=2, dropout=0.2), job(1, steps=6, checkpoint_steps=3, r=2)]
    specs = [spec for _, spec in jobs]
    expected, killed = alone.train(jobs), started(jobs, tmp_path)
    before = {spec.id: list[FromEngine]() for spec in specs}
    while len(metrics_of(before["job-1"])) < 4 or len(metrics_of(before["job-0"])) < 3:
        for message in killed.advance(specs[0].id, None, [spec.id for spec in specs]):
            before[message.id].append(message)
    saved = [max(m.step for m in before[spec.id] if isinstance(m, JobCheckpoint)) for spec in specs]
    again = Bench(base(), tmp_path / "together")
    assert [again.start(spec).resumed_from for spec in specs] == saved
    after = train_together(again, specs)
    for spec, own in zip(specs, expected, strict=True):
        steps = {m.step: m for m in metrics_of([*before[spec.id], *after[spec.id]])}
        assert [m.loss for m in steps.values()] == pytest.approx([m.loss for m in metrics_of(own)], abs=TOLERANCE)
        assert_same_adapter(published(again, spec), alone.weights(spec))


def test_a_loss_that_is_not_finite_ends_its_job_alone(alone: Alone, tmp_path: Path) -> None:
    """Its rows are NaN in every layer, in the middle of the others' rows."""
    bench = Bench(base(), tmp_path / "together")
    bench.train(bench.place(*_with(job(4), steps=1)))
    weights = bench.folder.adapter(AdapterRef("a4", 1)) / ADAPTER_WEIGHTS
    save_file({name: torch.full_like(tensor, 3e38) for name, tensor in load_file(weights).items()}, weights)
    jobs = [VARIED[0], job(5, init_from=AdapterRef("a4", 1)), VARIED[1]]
    for corpus, spec in jobs:
        bench.start(bench.place(corpus, spec))
    found = train_together(bench, [spec for _, spec in jobs], micro_steps=2)
    failed = found["job-5"][-1]
    assert isinstance(failed, JobFailed) and failed.code == "non_finite_loss"
    for (_, spec), own in zip(VARIED[:2], alone.train(VARIED[:2]), strict=True):
        assert_same_curve(found[spec.id], own)
    assert not any(bench.trainer.notes)


def _with(made: tuple[Corpus, JobSpec], **changes: object) -> tuple[Corpus, JobSpec]:
    corpus, spec = made
    return corpus, job_spec(corpus, spec.id, adapter=spec.adapter, **changes)


POINTS = ((training_pass, "pack_jobs"), (LayerCut, "layer"), (LayerCut, "head"), (torch.autograd, "grad"))


@pytest.mark.parametrize("call", by_day([0, 2, 4, 6], 4))
def test_a_shared_batch_without_memory_is_tried_again_in_smaller_ones(alone: Alone, tmp_path: Path, call: int) -> None:
    expected, bench = alone.train(VARIED), started(VARIED, tmp_path)
    notes = list[tuple[str, ...]]()
    with out_of_memory_at(POINTS, lambda number: number == call) as faults:
        found = train_together(
            bench, [spec for _, spec in VARIED], between=lambda queue: notes.append(bench.trainer.notes)
        )
    assert faults.failed == 1
    for (_, spec), own in zip(VARIED, expected, strict=True):
        assert_same_curve(found[spec.id], own)
        assert not any(isinstance(message, JobNote) for message in found[spec.id]), "no job is to blame"
    assert "not enough memory for larger batches of several jobs" in notes[0][0]
    assert bench.trainer.notes == (), "forgotten with the last job"


def test_a_new_plan_does_not_forget_that_a_shared_batch_had_no_memory(tmp_path: Path) -> None:
    bench, ids = started(VARIED, tmp_path), [spec.id for _, spec in VARIED]

    def shared(planned: int | None) -> int:
        bench.trainer.limit_shared(planned)
        bench.trainer.advance(ids[0], None, ids)
        return len(bench.trainer.trained)

    first = shared(50)
    assert first > 1
    with out_of_memory_at(POINTS, lambda number: number == 0):
        shared(50)
    notes, after = bench.trainer.notes, shared(50)
    assert notes and 1 < after < first
    assert (shared(49), shared(None), shared(50)) == (after, after, after)
    assert bench.trainer.notes == notes
    assert shared(1) == 1
    assert bench.trainer.notes == (), "the plan is lower"


def test_a_job_whose_update_lacks_memory_begins_its_step_again_by_itself(alone: Alone, tmp_path: Path) -> None:
    expected, bench = alone.train(VARIED[:2]), started(VARIED[:2], tmp_path)
    with out_of_memory_at([(AdapterOptimizer, "divide_grads")], lambda number: number == 1):
        found = train_together(bench, [spec for _, spec in VARIED[:2]])
    noted = [spec.id for _, spec in VARIED[:2] if any(isinstance(m, JobNote) for m in found[spec.id])]
    assert len(noted) == 1
    for (_, spec), own in zip(VARIED[:2], expected, strict=True):
        ours, theirs = metrics_of(found[spec.id]), metrics_of(own)
        assert [m.tokens for m in ours] == [m.tokens for m in theirs]
        if spec.id not in noted:
            assert_same_curve(found[spec.id], own)


def test_a_shared_batch_that_fails_ends_the_job_that_fails_alone(
    alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    poisoned = job(6, r=7)
    expected, bench = alone.train(VARIED[:2]), started([*VARIED[:2], poisoned], tmp_path)
    forward_backward = MicroBatchRunner.forward_backward

    def poisonous(self: MicroBatchRunner, rows, lora, *args, **options):
        if any(weights.settings.r == 7 for weights in lora.adapters):
            raise ZeroDivisionError
        return forward_backward(self, rows, lora, *args, **options)

    monkeypatch.setattr(MicroBatchRunner, "forward_backward", poisonous)
    specs, notes = [*(spec for _, spec in VARIED[:2]), poisoned[1]], list[tuple[str, ...]]()
    ended = list[str]()
    with caplog.at_level(logging.CRITICAL):
        queue, found = JobQueue(), {spec.id: list[FromEngine]() for spec in specs}
        for spec in specs:
            queue.add(spec.id)
        while len(queue):
            leader = queue.ready()[0]
            try:
                messages = bench.advance(leader, None, queue.ready())
            except ZeroDivisionError:  # the runner of jobs ends it then
                ended.append(leader)
                queue.remove(leader)
                bench.trainer.drop(leader)
                continue
            for message in messages:
                found[message.id].append(message)
                if isinstance(message, JobSucceeded):
                    queue.remove(message.id)
                    bench.trainer.drop(message.id)
            for own in bench.trainer.trained:
                if own in queue:
                    queue.rotate(own)
            notes.append(bench.trainer.notes)
    assert ended == ["job-6"]
    assert len(notes[0]) == 3 and all("it trains alone" in note for note in notes[0])
    for (_, spec), own in zip(VARIED[:2], expected, strict=True):
        assert_same_curve(found[spec.id], own)


def test_a_pass_without_jobs_frees_its_memory(tmp_path: Path) -> None:
    bench = started(VARIED[:2], tmp_path)
    ids = [spec.id for _, spec in VARIED[:2]]
    before = len(alive(TrainingPass))
    bench.advance(ids[0], 1, ids)
    assert set(bench.trainer.trained) == set(ids)
    bench.trainer.abandon(ids[0])
    assert len(alive(TrainingPass)) == before + 1
    bench.trainer.abandon(ids[1])
    assert len(alive(TrainingPass)) == before
