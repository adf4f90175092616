"""Decode steps choose the smallest number of tiles that holds their adapters' rows."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from coserve.core.types import LoraSettings
from coserve.generate.execution.adapter_slots import AdapterSlots
from coserve.generate.execution.footprint import LoraFootprint
from coserve.generate.execution.graph_sizes import TileCapacity, decode_tile_capacities
from coserve.generate.execution.slot_lora import StaticSlotLora
from coserve.kernels.lora.segmented.slot_lora import SlotLora
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair, SiteGroup
from coserve.lora.store.packing import copied_into, packed, packed_bytes
from coserve.model.lora import LoraWeights
from tests.support.shelf import named

CPU = torch.device("cpu")
GROUP = SiteGroup(("q",))


def weights(rank: int) -> LoraWeights:
    return LoraWeights(LoraSettings(r=rank), {"q": LoraPair(torch.randn(rank, 8), torch.randn(8, rank), 1.0)})


@given(st.integers(1, 300))
def test_capacities_reach_from_one_adapter_to_an_adapter_a_row(batch: int) -> None:
    tall = [capacity.tiles for capacity in decode_tile_capacities(batch) if capacity.rows == 16]
    low = [capacity.tiles for capacity in decode_tile_capacities(batch) if capacity.rows == 8]
    assert tall == ([-(-batch // 16)] if batch > 8 else [])
    assert low[0] == -(-batch // 8)
    assert low[-1] == batch
    assert low == sorted(set(low))
    assert all(after <= 2 * before for before, after in pairwise(low))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_a_capacity_holds_all_rows_and_none_before_it_does(lengths: list[int]) -> None:
    slots = AdapterSlots([[GROUP]], len(lengths), CPU)
    held = [weights(rank=16 if n % 2 else 32) for n in range(len(lengths))]
    placed = slots.place(named(held))
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    most = max(96, bounds[-1])
    lora = StaticSlotLora(slots, most, LoraFootprint(32, slots.all_groups), decode_tile_capacities(most))
    capacity = lora.load(Segments(tuple(bounds), tuple(placed)))
    needed = {rows: sum(-(-length // rows) for length in lengths) for rows in (8, 16)}
    assert capacity.tiles >= needed[capacity.rows]
    assert all(other.tiles < needed[other.rows] for other in lora.capacities[: lora.capacities.index(capacity)])
    seen = lora.within(capacity)
    assert isinstance(seen, SlotLora)
    tiles = seen.plan.tiles
    assert tiles.rows == capacity.rows
    assert int(tiles.tiles[:, 1].sum()) == bounds[-1], "a row is in no tile"
    assert tiles.items.shape[0] == 2 * capacity.tiles
    assert int(tiles.items[:, 1].sum()) == sum(
        length * slots.local.ranks[placed[n]] // 16 for n, length in enumerate(lengths)
    )


def test_a_step_after_one_of_other_tiles_is_loaded_again() -> None:
    """Tall and low tiles lie in buffers of their own: what was loaded last counts."""
    slots = AdapterSlots([[GROUP]], 3, CPU)
    held = [weights(rank=16) for _ in range(3)]
    placed = slots.place(named(held))
    lora = StaticSlotLora(slots, 16, LoraFootprint(16, slots.all_groups), decode_tile_capacities(16))
    one, three = Segments((0, 16), (placed[0],)), Segments((0, 1, 2, 3), tuple(placed))
    for segments in (one, three, one, three):
        capacity = lora.load(segments)
        seen = lora.within(capacity)
        assert isinstance(seen, SlotLora)
        assert int(seen.plan.tiles.tiles[:, 1].sum()) == segments.tokens


def test_the_kernels_follow_the_capacity() -> None:
    """Mixed steps of few adapters have tiles of the prefill kernels, those of many tiles of the decode kernels."""
    slots = AdapterSlots([[GROUP]], 3, CPU)
    placed = slots.place(named([weights(rank=16) for _ in range(3)]))
    capacities = [TileCapacity(64, 2), TileCapacity(8, 12)]
    lora = StaticSlotLora(slots, 96, LoraFootprint(16, slots.all_groups), capacities)
    one, three = Segments((0, 90), (placed[0],)), Segments((0, 1, 2, 70), tuple(placed))
    for segments, capacity in ((one, capacities[0]), (three, capacities[1]), (one, capacities[0])):
        assert lora.load(segments) == capacity
        seen = lora.within(capacity)
        assert isinstance(seen, SlotLora)
        assert (seen.plan.decode, seen.plan.tiles.rows) == (capacity.rows == 8, capacity.rows)
        assert int(seen.plan.tiles.tiles[:, 1].sum()) == segments.tokens


def test_block_diagonal_adapters_lie_in_slots_with_their_zeros() -> None:
    pair = LoraPair(torch.randn(8, 8), torch.randn(8, 4), 1.0, b_blocks=2)
    slots = AdapterSlots([[GROUP]], 2, CPU)
    (slot,) = slots.place(named([LoraWeights(LoraSettings(r=8, bd_blocks=2), {"q": pair})]))
    table = slots.local.tables[GROUP]
    assert not table.blocked
    assert table.ranks[slot].tolist() == [8]
    address = int(table.addresses[slot, 0, 1])
    b_OR = torch.frombuffer((ctypes.c_float * 64).from_address(address), dtype=torch.float32).view(8, 8)
    assert torch.equal(b_OR, pair.dense().b_OR)


def test_block_diagonal_adapters_of_the_store_take_no_memory_besides_their_pages() -> None:
    """The table points into the pages, which the memory plan counts."""
    pair = LoraPair(torch.randn(8, 8), torch.randn(8, 4), 1.0, b_blocks=2)
    adapter = LoraWeights(LoraSettings(r=8, bd_blocks=2), {"q": pair})
    host = packed(adapter, for_kernels=True)
    pages = torch.zeros(packed_bytes(host), dtype=torch.uint8)
    gpu = copied_into(pages, host)
    assert torch.equal(gpu.sites["q"].b_OR, pair.dense().b_OR)
    slots = AdapterSlots([[GROUP]], 2, CPU)
    (slot,) = slots.place(named([gpu]))
    a, b = slots.local.tables[GROUP].addresses[slot, 0].tolist()
    assert pages.data_ptr() <= a < b < pages.data_ptr() + len(pages)
