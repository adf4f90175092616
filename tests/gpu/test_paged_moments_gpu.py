"""Paged moments on a GPU: pieces of pinned memory that come and go beside updates, and give the numbers of moments that
stay."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

from coserve.core.training.settings import Optimizer
from coserve.finetune.optimizer import AdapterOptimizer
from tests.support.updates import random_update, same_tensors, wide_optimizer

pytestmark = pytest.mark.gpu

PAGED = [kind for kind in Optimizer if kind.paged]
PIECE = 1 << 12
"""Weights."""
STEPS = 6


def made(kind: Optimizer, ratio: float | None = None) -> AdapterOptimizer:
    return wide_optimizer(kind, "cuda", ratio, PIECE)


def state(optimizer: AdapterOptimizer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in optimizer.snapshot()().items()}


@pytest.mark.parametrize("kind", PAGED)
@pytest.mark.parametrize("ratio", [None, 16.0])
@pytest.mark.parametrize("own_stream", [False, True])
def test_updates_are_those_without_paging(kind: Optimizer, ratio: float | None, own_stream: bool) -> None:
    """Bit for bit, whether or not training has a stream of its own; a delay on it shows copies that do not wait."""
    stream: AbstractContextManager[object] = torch.cuda.stream(torch.cuda.Stream()) if own_stream else nullcontext()
    with stream:
        one, other = made(kind, ratio), made(kind.unpaged, ratio)
        for seed in range(STEPS):
            torch.cuda._sleep(20_000_000)
            random_update(one, seed)
            random_update(other, seed)
            if seed == 2:
                assert same_tensors(state(one), state(other))
        assert same_tensors(state(one), state(other))
        torch.cuda.current_stream().synchronize()


@pytest.mark.parametrize("kind", PAGED)
def test_a_snapshot_is_the_state_at_its_step_though_updates_follow_at_once(kind: Optimizer) -> None:
    one, other = made(kind), made(kind.unpaged)
    for seed in range(3):
        random_update(one, seed)
        random_update(other, seed)
    expected = state(other)
    torch.cuda._sleep(50_000_000)
    tensors = one.snapshot()
    for _ in range(5):
        one.grads[0][0].normal_()
        one.update(1.0, 0.1)
    kept = {name: tensor.clone() for name, tensor in tensors().items()}
    assert same_tensors(kept, expected) and not same_tensors(state(one), expected)
    one.restore(kept, steps=3)
    assert same_tensors(state(one), expected)
    for optimizer in (one, other):
        random_update(optimizer, 9)
    assert same_tensors(state(one), state(other))


@pytest.mark.parametrize("kind", PAGED)
def test_the_gpu_has_weights_and_buffers_alone(kind: Optimizer) -> None:
    """Host memory that a GPU copies from is pinned."""
    one = made(kind)
    assert [each.name for each in one.kept] == ["weights", "best"] and len(one.state) == 2
    moments = [tensor for name, tensor in one.snapshot()().items() if name.startswith("exp_avg")]
    assert moments and all(tensor.is_pinned() for tensor in moments)
