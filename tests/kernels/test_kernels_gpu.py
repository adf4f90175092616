"""What only a GPU can show: bfloat16, real tiles, CUDA graphs, torch.compile. Run with `pytest -m gpu`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from coserve.kernels.lora import reference
from coserve.kernels.lora.block_sparse import BlockSparseBackend
from coserve.kernels.lora.segmented import plan, terms
from coserve.kernels.lora.segmented.adapter_table import Slots, slot_columns
from coserve.kernels.lora.segmented.backend import SegmentedBackend
from coserve.kernels.lora.segmented.tiles import StepTiles, cut
from coserve.kernels.lora.segments import Segments
from tests.support.lora_grids import (
    BD_GRIDS,
    GRIDS,
    Case,
    Grid,
    add_group,
    adding,
    check_gradients,
    make_case,
    relative_error,
)

pytestmark = pytest.mark.gpu
WIDE = (
    *GRIDS,
    Grid("llama_decode", (2,) * 32, tuple(range(32)), (16,) * 32, 4096, 4096),
    Grid("llama_down", (1,) * 5, tuple(range(5)), (8, 16, 32, 64, 128), 14336, 4096),
    Grid("llama_gate", (64,), (0,), (16,), 4096, 14336),
    Grid("prefill", (512, 100, 1, 300), (0, 1, 2, 0), (16, 24, 64), 4096, 1024),
    Grid("prefill_of_many_blocks", (1000, 500, 1, 1100), (0, 1, -1, 2), (16, 40, 100), 4096, 3072),
    Grid("prefill_of_odd_rows", (1000, 500, 1, 1100), (0, 1, -1, 2), (5, 24, 17), 1000, 4095),
    Grid("prefill_of_large_ranks", (700, 1500), (0, 1), (256, 130), 1024, 4096),
    *BD_GRIDS,
    Grid("bd_q", (2,) * 8, tuple(range(8)), (128,) * 8, 4096, 4096, b_blocks=(8, 4, 2, 1) * 2),
    Grid("bd_k", (3, 1, 2), (0, 1, 2), (128, 64, 96), 4096, 1024, b_blocks=(8, 8, 4)),
    Grid("bd_down", (1, 8, 17), (0, 1, 2), (128, 64, 96), 14336, 4096, a_blocks=(8, 1, 4)),
    Grid("bd_prefill_gate", (512, 100, 1, 300), (0, 1, 2, 0), (128, 24, 64), 4096, 14336, b_blocks=(8, 1, 4)),
    Grid("bd_prefill_k", (1000, 500, 1, 1100), (0, 1, -1, 2), (64, 40, 128), 4096, 1024, b_blocks=(8, 2, 8)),
    Grid("bd_prefill_down", (512, 100, 1, 300), (0, 1, 2, 0), (128, 24, 64), 14336, 4096, a_blocks=(8, 1, 2)),
    Grid("bd_prefill_of_large_ranks", (700, 1500), (0, 1), (256, 256), 1024, 4096, b_blocks=(8, 2)),
)
BACKEND = SegmentedBackend()
lora_add, block_sparse_add = adding(BACKEND), adding(BlockSparseBackend())
named = pytest.mark.parametrize("grid", WIDE, ids=lambda grid: grid.name)


def poisoned(tensor: Tensor) -> Tensor:
    """The tensor's values in the middle of NaNs, rows ahead and behind, its own storage aligned as a page is."""
    margin = max(64, 4 * tensor.shape[-1] if tensor.numel() else 64)
    margin += -margin % 64
    buffer = torch.full((tensor.numel() + 2 * margin,), float("nan"), dtype=tensor.dtype, device=tensor.device)
    middle = buffer[margin : margin + tensor.numel()].view(tensor.shape)
    middle.copy_(tensor)
    return middle


def poisoned_case(grid: Grid) -> Case:
    case = make_case(grid, torch.bfloat16, "cuda")
    pairs = tuple(
        None if pair is None else replace(pair, a_RD=poisoned(pair.a_RD), b_OR=poisoned(pair.b_OR))
        for pair in case.pairs
    )
    held = [torch.full((1 << 24,), float("nan"), device="cuda") for _ in range(4)]
    del held  # what the kernels allocate next lies in NaNs
    return Case(poisoned(case.y), poisoned(case.x), case.segments, pairs)


@named
@pytest.mark.parametrize("prefill", [False, True], ids=["decode", "prefill"])
def test_segmented_bf16_among_poison(grid: Grid, prefill: bool) -> None:
    backend = SegmentedBackend(plan.Cutting(decode_max_run=0)) if prefill else BACKEND
    case = poisoned_case(grid)
    expected = reference.lora_add(case.y, case.x, case.segments, case.pairs)
    with torch.no_grad():
        got = adding(backend)(case.y, case.x, case.segments, case.pairs)
    assert relative_error(got, expected) <= 1e-2


@named
def test_segmented_gradients_bf16(grid: Grid) -> None:
    check_gradients(lora_add, grid, torch.bfloat16, "cuda")


@named
def test_block_sparse_bf16(grid: Grid) -> None:
    case = make_case(grid, torch.bfloat16, "cuda")
    expected = reference.lora_add(case.y, case.x, case.segments, case.pairs)
    kept_add = adding(BlockSparseBackend().keeping())
    for add in (block_sparse_add, kept_add, kept_add):  # the last one copies no weights
        assert relative_error(add(case.y.clone(), case.x, case.segments, case.pairs), expected) <= 1e-2


@named
def test_block_sparse_gradients_bf16(grid: Grid) -> None:
    check_gradients(block_sparse_add, grid, torch.bfloat16, "cuda")


def test_sites_of_one_input_together() -> None:
    grids = [
        Grid(name, (2, 1, 30), (0, 1, 2), ranks, 512, out, b_blocks=blocks)
        for name, ranks, out, blocks in (
            ("q", (16, 8, 64), 512, (1, 1, 4)),
            ("k", (16, 0, 64), 128, (1, 1, 8)),
            ("v", (8, 8, 16), 136, (4, 1, 1)),
            ("w", (4, 5, 6), 256, ()),
        )
    ]
    cases = [make_case(grid, torch.bfloat16, "cuda", seed=seed) for seed, grid in enumerate(grids)]
    x, segments = cases[0].x, cases[0].segments
    expected = [reference.lora_add(case.y, x, segments, case.pairs) for case in cases]
    got = add_group(BACKEND, [case.y for case in cases], x, segments, [case.pairs for case in cases])
    for mine, wanted in zip(got, expected, strict=True):
        assert relative_error(mine, wanted) <= 1e-2


@pytest.mark.parametrize("rank", [8, 17, 32, 33, 64, 100, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_prefill_kernels_of_three_sites_fit_at_every_rank(rank: int, dtype: torch.dtype) -> None:
    grids = [Grid(name, (130, 90), (0, 1), (rank, 8), 1024, 512) for name in "qkv"]
    cases = [make_case(grid, dtype, "cuda", seed=seed, grad=True) for seed, grid in enumerate(grids)]
    x, segments, pairs = cases[0].x, cases[0].segments, [case.pairs for case in cases]
    expected = [reference.lora_add(case.y, x, segments, case.pairs) for case in cases]
    got = add_group(BACKEND, [case.y for case in cases], x, segments, pairs)
    leaves = [x, *(leaf for case in cases for leaf in case.leaves()[2:])]
    gradients = [torch.autograd.grad(sum(out.float().sum() for out in outs), leaves) for outs in (got, expected)]
    with torch.no_grad():
        in_place = add_group(BACKEND, [case.y.clone() for case in cases], x, segments, pairs)
    for mine, wanted in (*zip(got, expected, strict=True), *zip(in_place, expected, strict=True)):
        assert relative_error(mine, wanted) <= 1e-2
    for mine, wanted in zip(*gradients, strict=True):
        assert relative_error(mine, wanted) <= 2e-2


def test_a_captured_graph_serves_other_adapters_and_batches() -> None:
    device = torch.device("cuda")
    ranks = (16, 8, 64, 5)
    first = make_case(Grid("first", (1, 3, 2, 2), (0, 1, 2, 3), ranks, 4096, 1024), torch.bfloat16, "cuda", seed=1)
    blocked = Grid("second", (4, 1, 3), (3, -1, 0), ranks, 4096, 1024, (4, 1, 1, 1), (1, 2, 8, 1))
    second = make_case(blocked, torch.bfloat16, "cuda", seed=2)
    slots, step = Slots(4, 1, device), StepTiles(8, 8, 32, 8, device)
    x, y = torch.empty_like(first.x), torch.empty_like(first.y)
    cut_as = plan.TilePlan(step.tiles, 64, True)

    def load(case: Case) -> None:
        for slot, pair in enumerate(case.pairs):
            slots.put(slot, *slot_columns([pair]))
        step.load(cut(case.segments, ranks, 8))
        x.copy_(case.x)
        y.copy_(case.y)

    load(first)
    terms.add_([y], x, cut_as, slots.table(0, 1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        terms.add_([y], x, cut_as, slots.table(0, 1))
    for case in (first, second, first):
        torch.cuda.synchronize()
        load(case)
        graph.replay()
        expected = reference.lora_add(case.y, case.x, case.segments, case.pairs)
        assert relative_error(y, expected) <= 1e-2


def test_batches_of_more_rows_than_int16() -> None:
    case = make_case(Grid("long", (40000,), (0,), (16,), 64, 64), torch.bfloat16, "cuda")
    expected = reference.lora_add(case.y, case.x, case.segments, case.pairs)
    assert relative_error(lora_add(case.y, case.x, Segments((0, 40000), (0,)), case.pairs), expected) <= 1e-2
