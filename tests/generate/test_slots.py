"""Decode steps choose the smallest number of tiles that holds their adapters' rows."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from coserve.generate.slots import DECODE_ROWS, AdapterSlots, StaticLora, rooms
from coserve.kernels.segments import LoraPair, Segments
from coserve.model.lora import LoraWeights
from coserve.types import LoraSettings

CPU = torch.device("cpu")


def weights(rank: int) -> LoraWeights:
    return LoraWeights(LoraSettings(r=rank), {"q": LoraPair(torch.randn(rank, 8), torch.randn(8, rank), 1.0)})


@given(st.integers(1, 300))
def test_rooms_reach_from_one_adapter_to_an_adapter_a_row(batch: int) -> None:
    found = rooms(batch)
    assert found[0] == -(-batch // DECODE_ROWS)
    assert found[-1] == batch
    assert list(found) == sorted(set(found))
    assert all(after <= 2 * before for before, after in pairwise(found))


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8))
def test_a_room_holds_all_rows_and_no_smaller_one_does(lengths: list[int]) -> None:
    slots = AdapterSlots([[("q",)]], len(lengths), CPU)
    held = [weights(rank=16 if n % 2 else 32) for n in range(len(lengths))]
    placed = slots.place(held)
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    lora = StaticLora(slots, 96, 32)
    room = lora.load(Segments(tuple(bounds), tuple(placed)))
    needed = sum(-(-length // DECODE_ROWS) for length in lengths)
    assert room >= needed
    assert all(smaller < needed for smaller in lora.rooms if smaller < room)
    seen = lora.within(room).tables(0, 0)
    assert seen is not None
    tiles = seen[0]
    assert int(tiles.tiles[:, 1].sum()) == bounds[-1], "a row is in no tile"
    assert tiles.items.shape[0] == 2 * room
    assert int(tiles.items[:, 1].sum()) == sum(
        length * slots.ranks[placed[n]] // 16 for n, length in enumerate(lengths)
    )
