from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coserve.kernels.lora.segmented.adapter_table import RANK_BLOCK, Slots, kernel_layout, site_table, slot_columns
from coserve.kernels.lora.segmented.tiles import StepTiles, base_only_tiles, cut, upload
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair, MainGrads

CPU = torch.device("cpu")
batches = st.lists(st.tuples(st.integers(0, 9), st.integers(-1, 3)), max_size=12)


def packed(shape: list[tuple[int, int]]) -> Segments:
    bounds = [0]
    for length, _ in shape:
        bounds.append(bounds[-1] + length)
    return Segments(tuple(bounds), tuple(adapter for _, adapter in shape))


def pair(rank: int, inputs: int = 8, outputs: int = 6, scaling: float = 2.0) -> LoraPair:
    return LoraPair(torch.randn(rank, inputs), torch.randn(outputs, rank), scaling)


@given(batches, st.sampled_from([1, 4, 16]), st.tuples(*[st.integers(0, 40)] * 4))
def test_tiles_hold_every_row_of_an_adapter_once(
    shape: list[tuple[int, int]], rows: int, ranks: tuple[int, ...]
) -> None:
    segments = packed(shape)
    host = cut(segments, ranks, rows)
    owner = {row: slot for start, length, slot, _ in host.tiles for row in range(start, start + length)}
    wanted = {
        row: adapter
        for adapter, start, end in zip(segments.adapters, segments.bounds, segments.bounds[1:], strict=False)
        for row in range(start, end)
        if adapter >= 0 and ranks[adapter]
    }
    assert owner == wanted
    assert sum(length for _, length, _, _ in host.tiles) == len(wanted)
    assert all(0 < length <= rows for _, length, _, _ in host.tiles)
    for first, count, slot, _ in host.spans:
        assert {tile[2] for tile in host.tiles[first : first + count]} == {slot}
    assert sum(count for _, count, _, _ in host.spans) == len(host.tiles)
    assert len(host.items) == sum(-(-ranks[slot] // RANK_BLOCK) for _, _, slot, _ in host.tiles)

    rest = base_only_tiles(segments, host, rows)
    left = [row for start, length, _, _ in rest for row in range(start, start + length)]
    assert sorted([*left, *wanted]) == list(range(segments.tokens))


def test_a_step_marks_what_it_does_not_need_inactive() -> None:
    step = StepTiles(4, 3, 6, 12, CPU)
    full, small = (packed([(n, 0), (n, 1), (2, 2)]) for n in (4, 1))
    step.load(cut(full, (20, 8, 4), 4))
    addresses = step.tiles.tiles.data_ptr(), step.tiles.items.data_ptr()
    small_host = cut(packed([(1, 2)]), (20, 8, 4), 4)
    step.load(small_host)
    assert step.tiles.tiles.tolist() == [[0, 1, 2, 1], [0] * 4, [0] * 4]
    assert step.tiles.items[:, 1].tolist() == [1, 0, 0, 0, 0, 0]
    assert addresses == (step.tiles.tiles.data_ptr(), step.tiles.items.data_ptr())
    assert not step.fits(cut(packed([(16, 0)]), (20, 8, 4), 4))
    assert upload(cut(small, (20, 8, 4), 4), 4, 4, CPU).tiles.shape == (3, 4)


def test_slots_show_in_views_that_were_taken_before() -> None:
    slots = Slots(2, 3, CPU)
    view = slots.table(1, 2)
    first = pair(4, scaling=0.5)
    slots.put(1, *slot_columns([None, first, pair(8)]))
    assert view.ranks.tolist() == [[0, 0], [4, 8]]
    assert view.scalings[1].tolist() == [0.5, 2.0]
    assert view.addresses[1, 0, 0].item() == first.a_RD.data_ptr()
    slots.clear(1)
    assert view.ranks.tolist() == [[0, 0], [0, 0]]


def test_a_pair_is_copied_only_where_it_cannot_be_read_as_it_is() -> None:
    even = pair(16)
    assert kernel_layout(even) is even
    odd = kernel_layout(pair(5))
    assert odd.b_OR.shape == (6, 8)
    assert not odd.b_OR[:, 5:].any()
    turned = LoraPair(torch.randn(8, 16).T, torch.randn(6, 16), 1.0)
    assert kernel_layout(turned).a_RD.is_contiguous()
    assert torch.equal(kernel_layout(turned).a_RD, turned.a_RD)


def test_what_a_table_says_of_a_pair() -> None:
    even, odd = pair(16, scaling=0.5), pair(5)
    assert even.entry == (even.a_RD.data_ptr(), even.b_OR.data_ptr(), 0, 0, 16, 0.5, 0)
    assert odd.entry is None
    copied = kernel_layout(odd).entry
    assert copied is not None
    assert copied.rank == 5
    summed = replace(even, main_grads=MainGrads(torch.zeros(16, 8), torch.zeros(6, 16)))
    assert summed.main_grads is not None
    assert summed.entry is not None
    assert summed.entry[2:4] == (summed.main_grads.a_RD.data_ptr(), summed.main_grads.b_OR.data_ptr())
    half = replace(even, main_grads=MainGrads(torch.zeros(16, 8).half(), torch.zeros(6, 16)))
    with pytest.raises(AssertionError, match="fp32 sums"):
        _ = half.entry


def test_starts_count_the_ranks_ahead() -> None:
    table, held = site_table([(pair(4), None, pair(8)), (None, pair(2), pair(3))], CPU)
    assert table.ranks.tolist() == [[4, 0], [0, 2], [8, 3]]
    assert table.starts is not None
    assert table.starts.tolist() == [[[0, 0], [0, 0]], [[4, 4], [0, 0]], [[4, 4], [2, 2]]]
    assert len(held) == 4


def test_block_diagonal_pairs_are_copied_only_where_their_rows_are_no_whole_vectors() -> None:
    a, b = torch.randn(16, 8), torch.randn(6, 8)
    for even in (LoraPair(a, torch.randn(6, 16), 1.0, a_blocks=4), LoraPair(a, b, 1.0, b_blocks=2)):
        assert kernel_layout(even) is even
    assert LoraPair(a, b, 1.0, b_blocks=2).entry[4:] == (16 | 1 << 24, 1.0, 0)
    odd = LoraPair(torch.randn(4, 6), torch.randn(6, 4), 1.0, a_blocks=2)
    copied = kernel_layout(odd)
    assert copied.a_RD.shape == (4, 16)
    assert torch.equal(copied.a_RD[:2, :6], odd.a_RD[:2])  # the columns 0 to 15 of the dense matrix
    assert torch.equal(copied.a_RD[2:, 6:12], odd.a_RD[2:])
    assert copied.a_RD.count_nonzero() == odd.a_RD.numel()
    wide = kernel_layout(LoraPair(torch.randn(20, 8), torch.randn(4, 10), 1.0, b_blocks=2))
    assert wide.b_OR.shape == (4, 24)
    assert wide.b_OR[:2, 10:].count_nonzero() == wide.b_OR[2:, :2].count_nonzero() == 0  # the latter's first is rank 8


def test_starts_count_what_is_packed() -> None:
    sites = [(LoraPair(torch.randn(8, 2), torch.randn(6, 8), 1.0, a_blocks=4), pair(4), pair(3))]
    sites += [(LoraPair(torch.randn(8, 8), torch.randn(6, 4), 1.0, b_blocks=2), pair(4), None)]
    table, _ = site_table(sites, CPU)
    assert table.starts is not None
    assert table.starts.tolist() == [[[0, 0], [0, 0]], [[2, 8], [8, 4]], [[6, 12], [12, 8]]]
    assert table.ranks.tolist() == [[8 | 3 << 16, 8 | 1 << 24], [4, 4], [3, 0]]
