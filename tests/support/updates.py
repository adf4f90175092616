"""Optimizers of one small adapter, and steps on random gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from coserve.admission import optimizers
from coserve.core.training.settings import Optimizer, TrainingSettings
from coserve.core.types import LoraSettings
from coserve.finetune.init import new_adapter
from coserve.finetune.lora_tensors import named_tensors
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.update_rules.rules import UpdateRule, WeightRange, make_rule
from coserve.model.lora import LoraWeights
from tests.support.finetuning import tiny_base

RuleMaker = Callable[[Sequence[WeightRange], TrainingSettings], UpdateRule]
BASE = tiny_base("llama")
LORA = LoraSettings(r=4, targets=("q_proj", "down_proj"))
EVERY = [
    pytest.param(
        one,
        marks=pytest.mark.skipif(
            one.eight_bit and not optimizers.find_spec("bitsandbytes"), reason="needs bitsandbytes"
        ),
    )
    for one in Optimizer
]


def start() -> LoraWeights:
    return new_adapter(LORA, BASE.spec, seed=1, dtype=torch.float32, device="cpu")


def made(training: TrainingSettings, rule: RuleMaker = make_rule) -> AdapterOptimizer:
    return AdapterOptimizer(start(), BASE.spec, training, torch.float32, make_rule=rule)


def gradients(steps: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    shapes = {name: tensor.shape for name, tensor in named_tensors(start())}
    return [{name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(steps)]


def update(optimizer: AdapterOptimizer, found: dict[str, Tensor], rate: float) -> None:
    for site, pair in optimizer.weights().sites.items():
        assert pair.main_grads is not None
        pair.main_grads.a_RD.copy_(found[f"{site}.a"])
        pair.main_grads.b_OR.copy_(found[f"{site}.b"])
    optimizer.step(targets=1, learning_rate=rate)


def same(one: AdapterOptimizer, other: AdapterOptimizer) -> bool:
    """Bit for bit, in all that a checkpoint has."""
    return same_tensors(one.snapshot()(), other.snapshot()())


def wide_optimizer(
    kind: Optimizer, device: str, ratio: float | None = None, piece: int = optimizers.PIECE
) -> AdapterOptimizer:
    """Of an adapter of rank 256, with copies in bf16, that keeps its best weights; skips the test where it needs a
    library that is not there. `ratio`: of LoRA+; `piece`: most weights of a piece of paged moments."""
    if kind.eight_bit:
        pytest.importorskip("bitsandbytes")
    weights = new_adapter(LoraSettings(r=256), BASE.spec, seed=1, dtype=torch.float32, device="cpu")
    training = TrainingSettings(validation_split=0.2, early_stopping_patience=1, lora_plus_ratio=ratio, optimizer=kind)
    return AdapterOptimizer(weights, BASE.spec, training, torch.bfloat16, torch.device(device), piece=piece)


def random_update(optimizer: AdapterOptimizer, seed: int) -> None:
    """A step on the gradients that follow from the seed."""
    generator = torch.Generator().manual_seed(seed)
    for layer in optimizer.grads:
        for gradient in layer:
            gradient.copy_(torch.randn(gradient.shape, generator=generator))
    optimizer.step(targets=3, learning_rate=0.01)


def same_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(other[name], tensor) for name, tensor in one.items())
