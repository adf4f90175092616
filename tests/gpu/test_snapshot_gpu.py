"""A job's state on its way between the GPU and the host, beside updates that change it."""

from __future__ import annotations

import pytest
import torch

from coserve.core.training.settings import Optimizer
from coserve.finetune.optimizer import AdapterOptimizer
from tests.support.updates import random_update, same_tensors, wide_optimizer

pytestmark = pytest.mark.gpu

UNPAGED = [kind for kind in Optimizer if not kind.paged]
"""The others have `test_paged_moments_gpu.py`."""


def on_host(optimizer: AdapterOptimizer) -> dict[str, torch.Tensor]:
    """All tensors of the state, by name."""
    return {
        f"{kind.name}/{name}": tensor.cpu().clone()
        for kind, row_N in zip(optimizer.kinds, optimizer.state, strict=True)
        for name, tensor in optimizer.layout.views(row_N, kind.per).items()
    }


@pytest.mark.parametrize("kind", UNPAGED)
def test_a_snapshot_is_the_state_at_its_step_though_updates_follow_at_once(kind: Optimizer) -> None:
    optimizer = wide_optimizer(kind, "cuda")
    for seed in range(3):
        random_update(optimizer, seed)
    optimizer.keep_best()
    expected = on_host(optimizer)
    optimizer.grads[0][0].normal_()
    tensors = optimizer.snapshot()
    for _ in range(20):
        optimizer.update(1.0, 0.1)
        optimizer.keep_best()
    kept = {name: tensor.clone() for name, tensor in tensors().items()}
    assert same_tensors(kept, expected)
    assert not same_tensors(on_host(optimizer), expected)
    optimizer.restore(kept, steps=3)
    assert same_tensors(on_host(optimizer), expected)


@pytest.mark.parametrize("kind", [Optimizer.ADAMW, Optimizer.LION])
@pytest.mark.parametrize("ratio", [None, 16.0])
def test_updates_on_the_gpu_are_those_on_the_cpu(ratio: float | None, kind: Optimizer) -> None:
    one, other = wide_optimizer(kind, "cuda", ratio), wide_optimizer(kind, "cpu", ratio)
    for seed in range(5):
        random_update(one, seed)
        random_update(other, seed)
    expected = on_host(other)
    for name, tensor in on_host(one).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", [Optimizer.ADAMW_8BIT, Optimizer.LION_8BIT])
def test_8_bit_updates_on_the_gpu_are_near_those_on_the_cpu(kind: Optimizer) -> None:
    """Their moments are rounded otherwise; weights whose gradients are 0, as those of A in a first step, stay."""
    one, other = wide_optimizer(kind, "cuda"), wide_optimizer(kind, "cpu")
    before = on_host(other)
    for optimizer in (one, other):
        optimizer.step(targets=1, learning_rate=0.01)
    assert same_tensors(
        {name: tensor for name, tensor in on_host(one).items() if name.startswith("weights/")},
        {name: tensor for name, tensor in before.items() if name.startswith("weights/")},
    )
    for seed in range(5):
        random_update(one, seed)
        random_update(other, seed)
    expected = on_host(other)
    for name, tensor in on_host(one).items():
        if name.startswith("weights/"):
            moved = (expected[name] - before[name]).abs().mean()
            assert (tensor - expected[name]).abs().mean() < 0.3 * moved, name


@pytest.mark.parametrize("kind", UNPAGED)
def test_updates_on_another_stream_come_in_their_turn(kind: Optimizer) -> None:
    """As slices beside generation have one: after the gradients that are still being computed, and before what reads
    the weights."""
    one, other = wide_optimizer(kind, "cuda"), wide_optimizer(kind, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    copies = []
    for seed in range(3):
        random_update(other, seed)
        copies.append(other.state[0].clone())
    for seed, expected in enumerate(copies):
        with torch.cuda.stream(stream):
            generator = torch.Generator().manual_seed(seed)
            drawn = [[torch.randn(g.shape, generator=generator).cuda() for g in layer] for layer in one.grads]
            torch.cuda._sleep(50_000_000)
            for layer, gradients in zip(one.grads, drawn, strict=True):
                torch._foreach_copy_(layer, gradients)
            norm = float(one.divide_grads(3))
            torch.cuda._sleep(50_000_000)
            one.update(norm, 0.01)
            found = one.state[0].clone()
        stream.synchronize()
        assert torch.equal(found, expected), seed
