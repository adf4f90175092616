from __future__ import annotations

from itertools import product

import pytest
import torch

from coserve.kernels.lora import reference
from coserve.kernels.lora.grouped import GroupedBackend
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair
from tests.support.lora_grids import BD_GRIDS, GRIDS, Grid, adding, check_forward, check_gradients, make_case

named = pytest.mark.parametrize("grid", (*GRIDS, *BD_GRIDS), ids=lambda grid: grid.name)
lora_add = adding(GroupedBackend())
RANKS = (1, 2, 3, 8, 16, 24, 64, 128)


@named
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_forward(grid: Grid, dtype: torch.dtype) -> None:
    check_forward(lora_add, grid, dtype)


@named
def test_gradients(grid: Grid) -> None:
    check_gradients(lora_add, grid, torch.float32)


@named
def test_reference_writes_nothing(grid: Grid) -> None:
    case = make_case(grid, torch.float32)
    before = [leaf.clone() for leaf in case.leaves()]
    reference.lora_add(case.y, case.x, case.segments, case.pairs)
    assert all(torch.equal(a, b) for a, b in zip(before, case.leaves(), strict=True))


DENSE = product(RANKS, (torch.float32, torch.float16, torch.bfloat16), ((64, 64), (96, 33), (256, 300)))
BLOCKS = ((4, 4, 1), (12, 3, 1), (4, 1, 4), (12, 1, 3))
WHOLE = [(Grid("whole", (50,), (0,), (rank,), *shape), dtype) for rank, dtype, shape in DENSE]
WHOLE += [(Grid("blocks", (50,), (0,), (rank,), 96, 60, (a,), (b,)), torch.float32) for rank, a, b in BLOCKS]


@pytest.mark.parametrize(("grid", "dtype"), WHOLE)
def test_a_row_on_cpu_does_not_depend_on_the_other_rows(grid: Grid, dtype: torch.dtype) -> None:
    whole = make_case(grid, dtype, seed=grid.ranks[0])
    expected = lora_add(whole.y.clone(), whole.x, whole.segments, whole.pairs)
    for start, end in ((0, 1), (49, 50), (3, 10), (5, 21), (7, 24), (10, 43), (1, 50)):
        got = lora_add(whole.y[start:end].clone(), whole.x[start:end], Segments((0, end - start), (0,)), whole.pairs)
        assert torch.equal(got, expected[start:end]), (start, end)


def test_a_row_on_cpu_does_not_depend_on_other_adapters() -> None:
    grid = Grid("mixed", (3, 1, 20, 2, 4), (0, 1, 2, 0, -1), (1, 8, 16))
    case = make_case(grid, torch.float32)
    together = lora_add(case.y.clone(), case.x, case.segments, case.pairs)
    bounds = case.segments.bounds
    for adapter, start, end in zip(grid.adapters, bounds, bounds[1:], strict=False):
        alone = Segments((0, end - start), (adapter,))
        got = lora_add(case.y[start:end].clone(), case.x[start:end], alone, case.pairs)
        assert torch.equal(got, together[start:end])


def test_writes_in_place_only_without_gradients() -> None:
    case = make_case(GRIDS[1], torch.float32)
    pair = case.pairs[0]
    assert pair is not None
    learned = LoraPair(pair.a_RD.clone().requires_grad_(), pair.b_OR, pair.scaling)
    kept = case.y.clone()
    out = lora_add(case.y, case.x, case.segments, [learned])
    assert torch.equal(case.y, kept)
    assert out.requires_grad
    assert lora_add(case.y, case.x, case.segments, case.pairs) is case.y
    assert not torch.equal(case.y, kept)
