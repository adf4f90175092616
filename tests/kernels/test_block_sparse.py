from __future__ import annotations

import pytest
import torch

from coserve.kernels.lora.block_sparse import BlockSparseBackend
from tests.support.lora_grids import (
    LONG,
    Grid,
    adding,
    check_forward,
    check_gradients,
    grids,
    make_case,
    relative_error,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
lora_add = adding(BlockSparseBackend())
quick = pytest.mark.parametrize("grid", grids(*LONG))


@quick
def test_forward(grid: Grid) -> None:
    check_forward(lora_add, grid, torch.float32, DEVICE)


@pytest.mark.parametrize("block", [16, 32, 64])
def test_block_sizes_agree(block: int) -> None:
    case = make_case(Grid("mixed", (3, 40, 1), (0, 1, 2), (8, 5, 40)), torch.float32, DEVICE)
    expected = lora_add(case.y.clone(), case.x, case.segments, case.pairs)
    got = adding(BlockSparseBackend(block))(case.y.clone(), case.x, case.segments, case.pairs)
    assert relative_error(got, expected) < 1e-5


@quick
def test_gradients(grid: Grid) -> None:
    check_gradients(lora_add, grid, torch.float32, DEVICE)


@pytest.mark.slow
def test_backward_keeps_its_block_size_when_another_was_used_in_between() -> None:
    grid = Grid("two", (3, 20), (0, 1), (8, 20))
    first, again = (make_case(grid, torch.float32, DEVICE, grad=True) for _ in range(2))
    out = adding(BlockSparseBackend(16))(first.y, first.x, first.segments, first.pairs)
    adding(BlockSparseBackend(64))(again.y, again.x, again.segments, again.pairs).sum().backward()
    out.sum().backward()
    for mine, wanted in zip(first.leaves(), again.leaves(), strict=True):
        assert relative_error(mine.grad, wanted.grad) < 1e-5


@pytest.mark.slow
def test_more_block_rows_than_int16_can_index() -> None:
    grid = Grid("long", (16 * 260,), (0,), (4,), inputs=16, outputs=16)
    case = make_case(grid, torch.float32, DEVICE)
    expected = make_case(grid, torch.float32, DEVICE)
    got = adding(BlockSparseBackend(16))(case.y, case.x, case.segments, case.pairs)
    pair = expected.pairs[0]
    assert pair is not None
    wanted = expected.y + pair.scaling * (expected.x @ pair.a_RD.T) @ pair.b_OR.T
    assert relative_error(got, wanted) < 1e-5
