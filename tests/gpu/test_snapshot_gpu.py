"""A job's state on its way between the GPU and the host, beside updates that change it."""

from __future__ import annotations

import msgspec
import pytest
import torch

from coserve.finetune.init import new_adapter
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.types import LoraSettings, TrainingSettings
from tests.support.finetuning import tiny_base

pytestmark = pytest.mark.gpu

TRAINING = TrainingSettings(validation_split=0.2, early_stopping_patience=1)


def made(device: str, ratio: float | None = None) -> AdapterOptimizer:
    spec = tiny_base("llama").spec
    start = new_adapter(LoraSettings(r=256), spec, seed=1, dtype=torch.float32, device="cpu")
    training = msgspec.structs.replace(TRAINING, lora_plus_ratio=ratio)
    return AdapterOptimizer(start, spec, training, torch.bfloat16, torch.device(device))


def update(optimizer: AdapterOptimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for layer in optimizer.grads:
        for gradient in layer:
            gradient.copy_(torch.randn(gradient.shape, generator=generator))
    optimizer.step(targets=3, learning_rate=0.01)


def test_a_snapshot_is_the_state_at_its_step_though_updates_follow_at_once() -> None:
    optimizer = made("cuda")
    for seed in range(3):
        update(optimizer, seed)
    optimizer.keep_best()
    expected = optimizer.state_KN.cpu().clone()
    optimizer.grads[0][0].normal_()
    tensors = optimizer.snapshot()
    for _ in range(20):
        optimizer.update(1.0, 0.1)
        optimizer.keep_best()
    found = tensors()
    for kind, row_N in zip(optimizer.kinds, expected, strict=True):
        for name, tensor in optimizer.layout.views(row_N).items():
            assert torch.equal(found[f"{kind}/{name}"], tensor), (kind, name)
    kept = {name: tensor.clone() for name, tensor in found.items()}
    assert not torch.equal(optimizer.state_KN.cpu(), expected)
    optimizer.restore(kept, steps=3)
    assert torch.equal(optimizer.state_KN.cpu(), expected)


@pytest.mark.parametrize("ratio", [None, 16.0])
def test_updates_on_the_gpu_are_those_on_the_cpu(ratio: float | None) -> None:
    one, other = made("cuda", ratio), made("cpu", ratio)
    for seed in range(5):
        update(one, seed)
        update(other, seed)
    torch.testing.assert_close(one.state_KN.cpu(), other.state_KN, rtol=1e-5, atol=1e-6)
