"""BD-LoRA pairs: what is packed, and what it stands for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coserve.kernels.lora import reference
from coserve.kernels.lora.grouped import GroupedBackend
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair
from tests.support.lora_grids import Grid, adding, check_forward, check_gradients

sizes = st.integers(1, 9)


@given(sizes, sizes, sizes, st.sampled_from([1, 2, 3, 4]), st.booleans())
def test_blocks_are_adapters_of_their_own(inputs: int, outputs: int, rank: int, blocks: int, of_a: bool) -> None:
    """The paper's other reading (section 3): one LoRA of rank R/N for each shard of the base's weight."""
    g = torch.Generator().manual_seed(blocks)
    R, D, O = rank * blocks, inputs * blocks, outputs * blocks
    x, y = torch.randn(3, D, generator=g), torch.randn(3, O, generator=g)
    a = torch.randn(R, D // blocks if of_a else D, generator=g)
    b = torch.randn(O, R if of_a else R // blocks, generator=g)
    pair = LoraPair(a, b, 0.5, a_blocks=blocks if of_a else 1, b_blocks=1 if of_a else blocks)
    got = reference.lora_add(y, x, Segments((0, 3), (0,)), [pair])
    parts = zip(a.chunk(blocks), x.chunk(blocks, 1) if of_a else [x] * blocks, strict=True)
    h = [part @ own.T for own, part in parts]
    if of_a:
        delta = sum(own @ block.T for own, block in zip(h, b.chunk(blocks, 1), strict=True))
    else:
        delta = torch.cat([own @ block.T for own, block in zip(h, b.chunk(blocks), strict=True)], 1)
    torch.testing.assert_close(got, y + 0.5 * delta)


@given(sizes, sizes, sizes, st.sampled_from([1, 2, 4]), st.booleans())
def test_grouped(inputs: int, outputs: int, rank: int, blocks: int, of_a: bool) -> None:
    both = (blocks, 1) if of_a else (1, blocks)
    grid = Grid("drawn", (2, 1, 3), (0, 1, 0), (rank * blocks, 5), 4 * inputs, 4 * outputs, (both[0], 1), (both[1], 1))
    check_forward(adding(GroupedBackend()), grid, torch.float32)
    check_gradients(adding(GroupedBackend()), grid, torch.float32)


def test_one_block_is_a_dense_matrix() -> None:
    pair = LoraPair(torch.randn(4, 8), torch.randn(6, 4), 1.0)
    assert pair.blocks == 1
    assert pair.dense() is pair


def test_both_matrices_in_blocks_are_refused() -> None:
    with pytest.raises(AssertionError, match="not both"):
        LoraPair(torch.randn(4, 8), torch.randn(6, 2), 1.0, a_blocks=2, b_blocks=2)
    with pytest.raises(AssertionError, match="whole blocks"):
        LoraPair(torch.randn(3, 4), torch.randn(6, 3), 1.0, a_blocks=2)
