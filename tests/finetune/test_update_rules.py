"""Optimizers besides AdamW: their formulas, their state in checkpoints, its bytes, and where they are refused."""

from __future__ import annotations

import importlib.machinery
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coserve.admission import optimizers
from coserve.admission.optimizers import aligned, check_optimizer, paged_kinds, state_kinds
from coserve.admission.shapes import ALLOCATION, flat_elements, job_state_bytes, lora_shapes, row_bytes
from coserve.api.http.parsing import decode_json
from coserve.core.errors import CheckpointUnreadable, InvalidRequest
from coserve.core.link.jobs import JobCheckpoint
from coserve.core.names import CHECKPOINT_STATE
from coserve.core.schemas.jobs import FinetuneRequest
from coserve.core.training.settings import Optimizer, TrainingRequest, TrainingSettings
from coserve.data.corpus.defaults import choose_training
from coserve.finetune.lora_tensors import named_tensors
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.update_rules.rules import EightBit, Lion
from tests.support.finetuning import Bench, job_spec, metrics_of, random_corpus
from tests.support.updates import BASE, EVERY, LORA, gradients, made, same, start, update

OTHERS = [one for one in EVERY if one.values[0] is not Optimizer.ADAMW]


@pytest.mark.parametrize("ratio", [None, 8.0])
@pytest.mark.parametrize("at_once", [1 << 22, 100])
def test_lion_is_the_papers_formula(ratio: float | None, at_once: int) -> None:
    training = TrainingSettings(
        optimizer=Optimizer.LION, beta1=0.8, beta2=0.95, weight_decay=0.1, max_grad_norm=0.0, lora_plus_ratio=ratio
    )
    weights = {name: tensor.double() for name, tensor in named_tensors(start())}
    moments = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    optimizer = made(training, partial(Lion, at_once=at_once))
    for step, found in enumerate(gradients(5)):
        for name, gradient in found.items():
            rate = 0.01 / (step + 1) * ((ratio or 1.0) if name.endswith(".b") else 1.0)
            between = 0.8 * moments[name] + 0.2 * gradient
            weights[name] -= rate * (between.sign() + 0.1 * weights[name])
            moments[name] = 0.95 * moments[name] + 0.05 * gradient
        update(optimizer, found, 0.01 / (step + 1))
    for name, tensor in named_tensors(optimizer.masters()):
        torch.testing.assert_close(tensor.double(), weights[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("at_once", [1 << 23, 1024])
@pytest.mark.parametrize("ratio", [None, 8.0])
@pytest.mark.parametrize("optimizer", [Optimizer.ADAMW_8BIT, Optimizer.LION_8BIT])
def test_8_bit_updates_are_bitsandbytes_own_of_each_tensor(
    optimizer: Optimizer, ratio: float | None, at_once: int
) -> None:
    """Bit for bit, though ours lie in one buffer: none shares a scale with another. And close to what 32 bits give."""
    own = pytest.importorskip("bitsandbytes").optim
    training = TrainingSettings(optimizer=optimizer, weight_decay=0.1, max_grad_norm=0.0, lora_plus_ratio=ratio)
    tensors = {name: tensor.clone() for name, tensor in named_tensors(start())}
    make = own.Lion8bit if optimizer.lion else own.AdamW8bit
    groups = [{"params": [t], "times": (ratio or 1.0) if n.endswith(".b") else 1.0} for n, t in tensors.items()]
    reference = make(groups, betas=(0.9, 0.999), weight_decay=0.1, min_8bit_size=0)
    ours = made(training, partial(EightBit, at_once=at_once))
    for step, found in enumerate(gradients(4)):
        for name, tensor in tensors.items():
            tensor.grad = found[name].clone()
        for group in reference.param_groups:
            group["lr"] = 0.01 / (step + 1) * group["times"]
        reference.step()
        update(ours, found, 0.01 / (step + 1))
    for name, tensor in named_tensors(ours.masters()):
        assert torch.equal(tensor, tensors[name]), name
    plain = made(TrainingSettings(weight_decay=0.1, max_grad_norm=0.0, lora_plus_ratio=ratio))
    if not optimizer.lion:  # the sign of a small number may differ
        for step, found in enumerate(gradients(4)):
            update(plain, found, 0.01 / (step + 1))
        for (name, one), (_, other) in zip(named_tensors(ours.masters()), named_tensors(plain.masters()), strict=True):
            assert (one - other).abs().mean() < 0.1 * (other - start_tensor(name)).abs().mean(), name


def start_tensor(name: str) -> Tensor:
    return dict(named_tensors(start()))[name]


@pytest.mark.parametrize("optimizer", EVERY)
@pytest.mark.parametrize("ratio", [None, 8.0])
def test_a_restored_optimizer_goes_on_bit_for_bit(optimizer: Optimizer, ratio: float | None) -> None:
    training = TrainingSettings(
        optimizer=optimizer, weight_decay=0.1, lora_plus_ratio=ratio, validation_split=0.1, early_stopping_patience=1
    )
    straight, cut = made(training), made(training)
    both: Sequence[AdapterOptimizer] = (straight, cut)
    for step, found in enumerate(gradients(6)):
        if step == 3:
            resumed = made(training)
            resumed.restore({name: tensor.clone() for name, tensor in cut.snapshot()().items()}, steps=step)
            both = (straight, resumed)
        for each in both:
            update(each, found, 0.01)
            if step == 2:
                each.keep_best()
    assert same(straight, both[1])
    assert straight.state[-1].any(), "the best weights too"


@pytest.mark.parametrize("optimizer", EVERY)
def test_a_warm_up_changes_nothing(optimizer: Optimizer) -> None:
    one, other = (made(TrainingSettings(optimizer=optimizer, weight_decay=0.1)) for _ in range(2))
    other.warm_up()
    for each in (one, other):
        update(each, gradients(1)[0], 0.01)
    assert same(one, other)


@pytest.mark.parametrize("optimizer", EVERY)
@pytest.mark.parametrize("early_stopping", [False, True])
def test_a_jobs_bytes_are_those_it_has(optimizer: Optimizer, early_stopping: bool) -> None:
    patience = 1 if early_stopping else None
    training = TrainingSettings(optimizer=optimizer, early_stopping_patience=patience, validation_split=0.1)
    planned = job_state_bytes(
        lora_shapes(LORA, BASE.spec), "float32", optimizer, early_stopping=early_stopping
    ).optimizer
    kept = sum(row_N.nbytes for row_N in made(training).state)
    if optimizer.paged:  # the smallest adapters' moments fit into a third of the buffers
        size = flat_elements(
            (part for one in lora_shapes(LORA, BASE.spec) for part in (one.a, one.b)), aligned(optimizer)
        )
        kept += 3 * sum(row_bytes(kind, size) for kind in paged_kinds(optimizer))
    assert 0 <= planned - kept <= ALLOCATION * (len(state_kinds(optimizer, early_stopping=early_stopping)) + 10)


@pytest.mark.parametrize("optimizer", EVERY)
@pytest.mark.parametrize("other", EVERY)
def test_a_state_of_another_optimizer_is_refused(optimizer: Optimizer, other: Optimizer) -> None:
    if optimizer.unpaged is other.unpaged:
        return
    resumed = made(TrainingSettings(optimizer=other))
    with pytest.raises(CheckpointUnreadable, match="optimizer"):
        resumed.restore(made(TrainingSettings(optimizer=optimizer)).snapshot()(), steps=1)


@pytest.mark.parametrize("optimizer", OTHERS)
def test_a_job_resumes_and_takes_no_checkpoint_of_another_optimizer(tmp_path: Path, optimizer: Optimizer) -> None:
    corpus = random_corpus()
    spec = job_spec(corpus, steps=6, checkpoint_steps=2, optimizer=optimizer, weight_decay=0.1, learning_rate=0.002)
    whole, cut = Bench(BASE, tmp_path / "whole"), Bench(BASE, tmp_path / "cut")
    expected = whole.train(whole.place(corpus, spec))
    assert metrics_of(expected)[-1].loss < metrics_of(expected)[0].loss
    cut.start(cut.place(corpus, spec))
    cut.run(spec.id, until=lambda m: isinstance(m, JobCheckpoint) and m.step == 4)
    state = cut.folder.checkpoint(spec.id, 4) / CHECKPOINT_STATE
    assert json.loads(state.read_text())["optimizer"] == optimizer.unpaged
    again = Bench(BASE, tmp_path / "cut")
    assert again.start(spec).resumed_from == 4
    again.trainer.drop(spec.id)
    other = Optimizer.LION if optimizer.unpaged is Optimizer.ADAMW else Optimizer.ADAMW
    state.write_text(state.read_text().replace(f'"{optimizer.unpaged}"', f'"{other}"'))
    assert again.start(spec).resumed_from == 2, "the other checkpoint is left aside"
    after = again.run(spec.id)
    assert metrics_of(after) == metrics_of(expected)[2:] and after[-1] == expected[-1]


def test_lion_has_its_own_defaults() -> None:
    plain, lion = (
        choose_training(TrainingRequest(optimizer=one), rows=9, tokens=99, hidden=2048)[0]
        for one in (Optimizer.ADAMW, Optimizer.LION)
    )
    assert (plain.beta2, lion.beta2) == (0.999, 0.99)
    assert lion.learning_rate == pytest.approx(plain.learning_rate / 3, rel=0.05)
    given = TrainingRequest(optimizer=Optimizer.LION, beta2=0.98, learning_rate=1e-3)
    chosen, auto = choose_training(given, rows=9, tokens=99, hidden=2048)
    assert (chosen.beta2, chosen.learning_rate) == (0.98, 1e-3) and "learning_rate" not in auto


@pytest.mark.parametrize("optimizer", [one for one in Optimizer if one.eight_bit])
def test_8_bit_optimizers_are_refused_where_they_cannot_run(
    monkeypatch: pytest.MonkeyPatch, optimizer: Optimizer
) -> None:
    plain = "lion" if optimizer.lion else "adamw"
    found = importlib.machinery.ModuleSpec("bitsandbytes", None)
    monkeypatch.setattr(optimizers, "find_spec", lambda name: found)
    check_optimizer(optimizer, ranks=1)
    with pytest.raises(InvalidRequest, match=f"{optimizer} is not supported with --tp 2: use {plain}$"):
        check_optimizer(optimizer, ranks=2)
    check_optimizer(Optimizer.LION, ranks=2)
    monkeypatch.setattr(optimizers, "find_spec", lambda name: None)
    with pytest.raises(InvalidRequest, match="needs bitsandbytes, which is not installed") as refused:
        check_optimizer(optimizer, ranks=1)
    assert refused.value.field == "training.optimizer" and "coserve[bitsandbytes]" in refused.value.message


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("adamw_torch_8bit", "did you mean 'adamw_8bit'?"),
        ("AdamW_Torch", "did you mean 'adamw'?"),
        ("sgd", "lion, lion_8bit, paged_adamw, paged_adamw_8bit, paged_lion, paged_lion_8bit"),
    ],
)
def test_other_libraries_names_of_optimizers(name: str, says: str) -> None:
    body = {"adapter": "a", "training": {"optimizer": name}}
    with pytest.raises(InvalidRequest) as refused:
        decode_json(json.dumps(body).encode(), FinetuneRequest)
    assert says in refused.value.message and refused.value.field == "training.optimizer"
    assert "expected one of adamw, adamw_8bit, lion, lion_8bit" in refused.value.message
