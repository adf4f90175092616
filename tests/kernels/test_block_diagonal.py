"""BD-LoRA pairs: what is packed, what it stands for, and that each backend computes it, beside dense pairs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coserve.kernels.lora import reference
from coserve.kernels.lora.grouped import GroupedBackend
from coserve.kernels.lora.segmented import plan
from coserve.kernels.lora.segmented.adapter_table import Slots, slot_columns
from coserve.kernels.lora.segmented.backend import SegmentedBackend
from coserve.kernels.lora.segmented.block_sizes import PrefillBlocks
from coserve.kernels.lora.segmented.slot_lora import SlotLora
from coserve.kernels.lora.segmented.tiles import cut, upload
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair, SiteGroup
from tests.support.examples import by_day, examples
from tests.support.lora_grids import (
    Grid,
    adding,
    check_forward,
    check_gradients,
    check_group,
    make_case,
    relative_error,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

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


@settings(max_examples=examples(20))
@given(sizes, sizes, sizes, st.sampled_from([1, 2, 4]), st.booleans(), st.sampled_from([1, 33, 65]))
def test_segmented(inputs: int, outputs: int, rank: int, blocks: int, of_a: bool, rows: int) -> None:
    """Of any size, in the decode and the prefill kernels."""
    both = (blocks, 1) if of_a else (1, blocks)
    grid = Grid(
        "drawn", (2, rows, 3), (0, 1, 0), (rank * blocks, 5), 4 * inputs, 4 * outputs, (both[0], 1), (both[1], 1)
    )
    check_forward(adding(SegmentedBackend()), grid, torch.float32, DEVICE)


SITES = (
    Grid("q", (66, 0, 3, 5, 2), (0, 1, 2, 3, -1), (64, 17, 24, 32), 96, 160, (), (4, 1, 2, 1)),
    Grid("k", (66, 0, 3, 5, 2), (0, 1, 2, 3, -1), (32, 8, 12, 0), 96, 72, (), (2, 1, 4, 1)),
    Grid("v", (66, 0, 3, 5, 2), (0, 1, 2, 3, -1), (96, 4, 30, 5), 96, 88, (2, 1, 3, 1), ()),
)
"""Three sites of one input: pairs of whole and of broken tiles, of A and of B, beside dense ones."""


@pytest.mark.slow
@pytest.mark.parametrize("run", [1, 64])
def test_prefill_and_gradients_of_sites_together(run: int) -> None:
    """Small batches are cut as large ones are: k among programs, up to `run` output blocks a program."""
    many = PrefillBlocks(k=32, o=32, run_blocks=run, split_length=16, expand_programs=1)
    backend = SegmentedBackend(plan.Cutting(prefill=many)) if run > 1 else SegmentedBackend()
    check_group(backend, SITES, DEVICE)


@pytest.mark.parametrize("lengths", by_day({"decode": (2, 1, 3, 1, 2), "prefill": (3, 70, 1, 2, 1)}, "prefill"))
def test_slots_hold_both_kinds(lengths: tuple[int, ...]) -> None:
    """A table that serving keeps: dense pairs and others, in any slot, in one launch."""
    grids = [Grid(g.name, lengths, g.adapters, g.ranks, 96, g.outputs, g.a_blocks, g.b_blocks) for g in SITES]
    cases = [make_case(grid, torch.float32, DEVICE, seed=at) for at, grid in enumerate(grids)]
    x, segments, device = cases[0].x, cases[0].segments, torch.device(DEVICE)
    slots = Slots(4, 3, device)
    for slot in range(4):
        slots.put(slot, *slot_columns([case.pairs[slot] for case in cases]))
    rows, decode = plan.tile_rows(segments)
    ranks = [max(grid.ranks[slot] for grid in SITES) for slot in range(4)]
    tiles = upload(cut(segments, ranks, rows), rows, segments.tokens, device)
    group = SiteGroup(("q", "k", "v"))
    lora = SlotLora({group: slots.table(0, 3)}, plan.TilePlan(tiles, 96, decode), frozenset({0}))
    expected = [reference.lora_add(case.y, x, segments, case.pairs) for case in cases]
    got = lora.add(group, [case.y.clone() for case in cases], x)
    for mine, wanted in zip(got, expected, strict=True):
        assert relative_error(mine, wanted) <= 1e-5


def test_slots_of_dense_pairs_refuse_others() -> None:
    pair = LoraPair(torch.randn(16, 8), torch.randn(6, 8), 1.0, b_blocks=2)
    slots = Slots(1, 1, torch.device("cpu"), blocked=False)
    with pytest.raises(AssertionError, match="dense pairs"):
        slots.put(0, *slot_columns([pair]))
    slots.put(0, *slot_columns([pair.dense()]))
