"""Fully sharded pairs through the kernels, the other GPU's part computed in the same process: many inputs, in
splits."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from coserve.kernels.lora.reference import lora_add
from coserve.kernels.lora.segmented.adapter_table import RANK_BLOCK, SlotColumns, Slots, table_entries
from coserve.kernels.lora.segmented.plan import TilePlan
from coserve.kernels.lora.segmented.slot_lora import ShardedPlan, ShardedSlotLora
from coserve.kernels.lora.segmented.tiles import cut, upload
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair, SiteGroup, TableEntry
from tests.support.examples import sample

INPUTS, OUTPUTS, RANKS = 2500, (40, 16, 24), (48, 6)
"""Inputs in three splits. Parts of the first rank are whole vectors, those of the second are not."""
GROUP = SiteGroup(("q", "k", "v"))
PAIRS = [[LoraPair(torch.randn(rank, INPUTS) * 0.05, torch.randn(out, rank), 0.5) for out in OUTPUTS] for rank in RANKS]


@dataclass
class OneOfTwo:
    """The exchange of one of two GPUs. `other`: what the other one's shrink gave; None: this is the other one."""

    own: int
    zero_padded: bool
    other: Tensor | None = None
    seen: Tensor | None = None
    shards: int = 2
    outputs: tuple[int, int] | None = None

    def needs_all_parts(self, size: int) -> bool:
        return self.zero_padded

    def run(self, h: Tensor) -> Tensor:
        self.seen = h.clone()
        other = h if self.other is None else self.other
        return h + other if self.zero_padded else torch.cat([h, other] if self.own == 0 else [other, h])


def _slots(own: int) -> Slots:
    slots = Slots(len(RANKS), len(OUTPUTS), torch.device("cpu"), blocked=False)
    for slot, (pairs, rank) in enumerate(zip(PAIRS, RANKS, strict=True)):
        half = slice(own * rank // 2, (own + 1) * rank // 2)
        entries, held = table_entries([LoraPair(p.a_RD[half], p.b_OR, p.scaling) for p in pairs])
        b = table_entries(pairs)
        whole = [TableEntry(e.a, w.b, 0, 0, rank, e.scaling) for e, w in zip(entries, b[0], strict=True)]
        slots.put(slot, SlotColumns.of(whole), (held, b))
    return slots


def _plan(segments: Segments, rows: int, *, decode: bool) -> ShardedPlan:
    tiles = upload(cut(segments, RANKS, rows), rows, segments.tokens, torch.device("cpu"))
    plan = TilePlan(tiles, -(-max(RANKS) // RANK_BLOCK) * RANK_BLOCK, decode)
    return ShardedPlan(plan, plan)


def _expected(segments: Segments, ys: list[Tensor], x: Tensor) -> list[Tensor]:
    return [lora_add(y, x, segments, [pairs[i] for pairs in PAIRS]) for i, y in enumerate(ys)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "decode", "zero_padded"), [(0, True, True), (1, True, False), (0, False, False), (1, False, False)]
)
def test_two_halves_make_the_whole(own: int, decode: bool, zero_padded: bool) -> None:
    segments = Segments((0, 2, 3, 5), (0, -1, 1))
    x, ys = torch.randn(5, INPUTS), [torch.randn(5, out) for out in OUTPUTS]
    expected = _expected(segments, ys, x)
    plan, other = _plan(segments, 8 if decode else 64, decode=decode), OneOfTwo(1 - own, zero_padded)
    for exchange in (other, how := OneOfTwo(own, zero_padded)):
        slots = _slots(exchange.own)
        lora = ShardedSlotLora({GROUP: slots.table(0, 3)}, {GROUP: exchange}, plan, frozenset({GROUP.index}))
        how.other = other.seen
        got = [y.clone() for y in ys]
        lora.add_(GROUP, got, x)
    for one, want in zip(got, expected, strict=True):
        torch.testing.assert_close(one, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", sample(list(product(range(len(RANKS)), (True, False))), (1, False)), ids=str)
def test_two_halves_of_one_row(case: tuple[int, bool]) -> None:
    """As it follows a GEMV: beside the end of the product."""
    slot, zero_padded = case
    segments, x = Segments((0, 1), (slot,)), torch.randn(1, INPUTS)
    y = torch.randn(1, sum(OUTPUTS))
    expected = torch.cat(_expected(segments, list(torch.split(y, OUTPUTS, 1)), x), 1)
    plan, other = _plan(segments, 8, decode=True), OneOfTwo(1, zero_padded)
    for exchange in (other, how := OneOfTwo(0, zero_padded)):
        how.other = other.seen
        slots, got = _slots(exchange.own), y.clone()
        lora = ShardedSlotLora({GROUP: slots.table(0, 3)}, {GROUP: exchange}, plan, frozenset({GROUP.index}))
        lora.add_(GROUP, torch.split(got, OUTPUTS, 1), x, overlapped=True)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
