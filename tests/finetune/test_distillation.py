"""Jobs with a teacher: their loss is the divergence from the outputs of another adapter on the same base."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coserve.core.errors import AdapterNotFound, CorruptAdapter
from coserve.core.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from coserve.core.training.jobs import Teacher
from coserve.core.training.settings import TrainingSettings
from coserve.core.types import AdapterDigests, AdapterRef, LoraSettings
from coserve.finetune.losses.loss import Loss
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.packed_rows import PackedRows
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.lora.interface import LoraBackend
from coserve.lora.files.conversion import ConversionOptions, convert_adapter
from coserve.lora.files.record import record_adapter
from coserve.lora.files.tensorfile import digest_file
from coserve.lora.store.files import load_adapter, save_adapter
from coserve.model.base import Base
from coserve.model.lora import LoraWeights
from tests.support.finetuning import (
    CPU,
    Bench,
    changing_adapter,
    gradient_sums,
    job_spec,
    metrics_of,
    pack_rows,
    random_corpus,
)
from tests.support.lora_backends import GROUPED, SEGMENTED, lora_of

CORPUS = random_corpus(lengths=(9, 5, 12, 3, 7, 8, 6, 11))
TEACHER, STUDENT = AdapterRef("teacher", 1), AdapterRef("student", 1)


def log_probabilities(base: Base, rows: PackedRows, weights: LoraWeights) -> torch.Tensor:
    attention, lora = PackedAttention(rows.bounds), lora_of(weights, rows.tokens)
    logits = base.forward(rows.tokens_T, rows.positions_T, attention, lora=lora, keep=rows.keep_K)
    return logits.double().log_softmax(-1)


@pytest.mark.parametrize(
    ("logits_bytes", "backend"),
    [(1 << 27, GROUPED), (1, GROUPED), pytest.param(1 << 27, SEGMENTED, marks=pytest.mark.slow)],
)
def test_loss_and_gradients_are_those_of_the_divergence(base: Base, logits_bytes: int, backend: LoraBackend) -> None:
    student = changing_adapter(base, LoraSettings(r=4, bd_blocks=2), seed=1, scale=0.3)
    teacher = changing_adapter(base, LoraSettings(r=6), seed=2, scale=0.3)
    rows = pack_rows(CORPUS, range(CORPUS.rows), CPU)
    optimizer = AdapterOptimizer(student, base.spec, TrainingSettings(), base.dtype)
    runner = MicroBatchRunner(base, recompute=False, logits_bytes=logits_bytes)
    learned, loss = lora_of(optimizer.weights(), rows.tokens, backend), Loss(teacher=teacher)
    sums_12 = run_to_end(runner.forward_backward(rows, learned, optimizer.trainable, optimizer.grads, loss))
    evaluated_12 = run_to_end(runner.evaluate(rows, learned, loss))

    sites = {
        site: replace(pair, a_RD=pair.a_RD.clone().requires_grad_(), b_OR=pair.b_OR.clone().requires_grad_())
        for site, pair in student.sites.items()
    }
    wanted = log_probabilities(base, rows, teacher).detach()
    found = log_probabilities(base, rows, LoraWeights(student.settings, sites))
    expected = (wanted.exp() * (wanted - found)).sum()
    assert float(expected.detach()) > 1.0
    assert sums_12.tolist() == [pytest.approx(evaluated_12.tolist()[0], rel=1e-6)], (
        "evaluation keeps less, and rounds otherwise"
    )
    right = int((found.argmax(-1) == rows.labels_K).sum())
    assert sums_12.tolist() == [[pytest.approx(float(expected.detach()), rel=1e-4), right]]
    expected.backward()
    by_name = {f"{site}.{part}": t.grad for site, p in sites.items() for part, t in (("a", p.a_RD), ("b", p.b_OR))}
    for name, gradient in gradient_sums(optimizer).items():
        torch.testing.assert_close(gradient, by_name[name], rtol=1e-3, atol=1e-4)


def converted(bench: Bench) -> Teacher:
    """The teacher, published, and beside it what its conversion to two blocks of rank 1 left of it."""
    base, source = bench.base, bench.folder.adapter(TEACHER)
    source.mkdir(parents=True)
    save_adapter(source, changing_adapter(base, LoraSettings(r=4), seed=2, scale=0.3), base.spec)
    digests = record_adapter(source, TEACHER, base.spec, source="import", created_at=0.0).digests
    target = bench.folder.adapter(STUDENT)
    target.mkdir(parents=True)
    convert_adapter(source, target, base.spec, ConversionOptions(bd_blocks=2, rank=2), digests)
    return Teacher(ref=TEACHER, digests=digests, rank=4)


DISTILL = {
    "adapter": "student",
    "version": 2,
    "init_from": STUDENT,
    "r": 2,
    "bd_blocks": 2,
    "steps": 30,
    "validation_split": 0.25,
    "eval_steps": 30,
    "checkpoint_steps": 2,
    "learning_rate": 0.01,
}


@pytest.mark.slow
def test_distillation_brings_a_converted_adapter_nearer_and_leaves_the_teacher(base: Base, tmp_path: Path) -> None:
    bench = Bench(base, tmp_path)
    teacher = converted(bench)
    corpus = random_corpus(lengths=(12,) * 40, learned=0.9)
    spec = bench.place(corpus, job_spec(corpus, teacher=teacher, batch_tokens=64, **DISTILL))
    metrics = metrics_of(bench.train(spec))
    assert {one.valid_loss_before for one in metrics} == {metrics[0].valid_loss_before}
    assert metrics[0].valid_loss_before is not None and metrics[-1].valid_loss is not None
    assert metrics[-1].valid_loss < 0.95 * metrics[0].valid_loss_before
    assert digest_file(bench.folder.adapter(TEACHER), ADAPTER_WEIGHTS) == teacher.digests.weights
    assert digest_file(bench.folder.adapter(TEACHER), ADAPTER_CONFIG) == teacher.digests.config
    weights = load_adapter(bench.folder.adapter(AdapterRef("student", 2)), base.spec, dtype=torch.float32)
    assert weights.settings.bd_blocks == 2


def test_the_divergence_before_is_measured_once_however_the_job_is_interrupted(base: Base, tmp_path: Path) -> None:
    whole = Bench(base, tmp_path / "whole")
    spec = job_spec(CORPUS, teacher=converted(whole), **(DISTILL | {"steps": 4}))
    expected = metrics_of(whole.train(whole.place(CORPUS, spec)))

    first = Bench(base, tmp_path / "parts")
    assert converted(first) == spec.teacher
    first.start(first.place(CORPUS, spec))
    for micro_steps in (1, 3, 9):
        first.trainer.advance(spec.id, micro_steps)
        first.trainer.abandon(spec.id)
    found = metrics_of(first.run(spec.id, until=lambda _: first.trainer.checkpoint_due(spec.id)))
    first.save(spec.id)
    again = Bench(base, tmp_path / "parts")
    found = found[: again.start(spec).resumed_from] + metrics_of(again.run(spec.id))
    assert [(m.loss, m.valid_loss, m.valid_loss_before) for m in found] == [
        (m.loss, m.valid_loss, m.valid_loss_before) for m in expected
    ]


def test_a_worse_adapter_is_not_published(base: Base, tmp_path: Path) -> None:
    bench = Bench(base, tmp_path)
    worse = DISTILL | {"learning_rate": 1.0, "eval_steps": 1, "early_stopping_patience": 2}
    spec = bench.place(CORPUS, job_spec(CORPUS, teacher=converted(bench), **worse))
    metrics = metrics_of(bench.train(spec))
    before, last = metrics[0].valid_loss_before, metrics[-1].valid_loss
    assert before is not None and last is not None and last > before
    assert [one.best_valid_loss for one in metrics] == [before, before], "two evaluations without a gain"
    start, result = (
        load_adapter(bench.folder.adapter(AdapterRef("student", version)), base.spec, dtype=torch.float32)
        for version in (1, 2)
    )
    for site, pair in start.sites.items():
        assert torch.equal(pair.a_RD, result.sites[site].a_RD) and torch.equal(pair.b_OR, result.sites[site].b_OR)


def test_a_better_adapter_is_published_and_its_loss_told(base: Base, tmp_path: Path) -> None:
    bench = Bench(base, tmp_path)
    spec = bench.place(
        CORPUS,
        job_spec(
            CORPUS, teacher=converted(bench), **(DISTILL | {"steps": 3, "eval_steps": 1}), early_stopping_patience=3
        ),
    )
    metrics = metrics_of(bench.train(spec))
    losses = [one.valid_loss for one in metrics if one.valid_loss is not None]
    assert metrics[0].valid_loss_before is not None
    assert metrics[-1].best_valid_loss == min(metrics[0].valid_loss_before, *losses)


def test_a_job_without_a_teacher_is_not_measured_before(base: Base, tmp_path: Path) -> None:
    bench = Bench(base, tmp_path)
    spec = bench.place(CORPUS, job_spec(CORPUS, steps=1, validation_split=0.25))
    assert [one.valid_loss_before for one in metrics_of(bench.train(spec))] == [None]


def test_a_teacher_that_is_gone_or_changed_is_named(base: Base, tmp_path: Path) -> None:
    bench = Bench(base, tmp_path)
    teacher = converted(bench)
    gone = Teacher(ref=AdapterRef("nobody", 1), digests=teacher.digests, rank=4)
    spec = bench.place(CORPUS, job_spec(CORPUS, teacher=gone, **DISTILL))
    with pytest.raises(AdapterNotFound, match="nobody@1") as error:
        bench.start(spec)
    assert error.value.field == "teacher"
    changed = Teacher(ref=TEACHER, digests=AdapterDigests("0" * 64, teacher.digests.config), rank=4)
    with pytest.raises(CorruptAdapter):
        bench.start(job_spec(CORPUS, teacher=changed, **DISTILL))
