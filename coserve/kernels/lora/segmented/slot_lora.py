"""LoRA terms of a serving step, read through tables at fixed addresses, for CUDA graphs. With fully sharded adapters, a
collective runs between the two launches of a group of sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from coserve.kernels.lora.exchange import Exchange
from coserve.kernels.lora.interface import PreparedLora
from coserve.kernels.lora.latent import HeadSizes
from coserve.kernels.lora.segmented import terms
from coserve.kernels.lora.segmented.adapter_table import RANK_BLOCK, SiteTable
from coserve.kernels.lora.segmented.launch_decode import decode
from coserve.kernels.lora.segmented.launch_latent import add_terms
from coserve.kernels.lora.segmented.launch_prefill import prefill_expand, prefill_shrink
from coserve.kernels.lora.segmented.launch_scale import scale_rows
from coserve.kernels.lora.segmented.plan import TilePlan
from coserve.kernels.lora.segmented.tiles import HostTiles
from coserve.kernels.lora.types import SiteGroup

Biases = Mapping[SiteGroup, Sequence[Tensor | None]]
"""The bias of each site of a group, this GPU's shard."""


class SlotLora(PreparedLora):
    """The terms of a step whose segments name slots of a table (`adapter_table.Slots`). Inference only.

    The host only looks up a table and launches, so it can be captured: the contents of `plan` and `tables` may change
    between replays.
    """

    def __init__(
        self,
        tables: Mapping[SiteGroup, SiteTable],
        plan: TilePlan,
        groups: frozenset[int],
        biases: Biases | None = None,
    ) -> None:
        """`groups`: `SiteGroup.index` of the groups that the step's adapters change, the same in every layer. `biases`:
        given if some adapters are DoRA."""
        self._tables, self.plan, self._groups, self._biases = tables, plan, groups, biases

    def changes(self, group: SiteGroup) -> bool:
        return group.index in self._groups

    def add(self, group: SiteGroup, ys: Sequence[Tensor], x_TD: Tensor) -> list[Tensor]:
        self.add_(group, ys, x_TD)
        return list(ys)

    def add_(self, group: SiteGroup, ys: Sequence[Tensor], x_TD: Tensor, *, overlapped: bool = False) -> None:
        self._add(group, ys, x_TD, overlapped=overlapped)
        if self.scales(group):
            self.scale_(group, ys)

    def scales(self, group: SiteGroup) -> bool:
        return self._biases is not None

    def scale_(self, group: SiteGroup, ys: Sequence[Tensor]) -> None:
        assert self._biases is not None, "expected DoRA adapters"
        scale_rows(ys, self.plan.tiles, self._tables[group], self._biases[group])

    def add_query_terms(self, group: SiteGroup, y_HTL: Tensor, q_HTN: Tensor, sizes: HeadSizes) -> None:
        add_terms(y_HTL, q_HTN, sizes, self.plan.tiles, self._tables[group], queries=True)

    def add_output_terms(self, group: SiteGroup, y_HTE: Tensor, x_HTL: Tensor, sizes: HeadSizes) -> None:
        add_terms(y_HTE, x_HTL, sizes, self.plan.tiles, self._tables[group], queries=False)

    def _add(self, group: SiteGroup, ys: Sequence[Tensor], x_TD: Tensor, *, overlapped: bool) -> None:
        """Add the terms; DoRA's scaling follows later."""
        terms.add_(ys, x_TD, self.plan, self._tables[group], overlapped=overlapped)


@dataclass(frozen=True)
class ShardedPlan:
    """Plans of a batch for fully sharded pairs: one with the items of all LoRA ranks, sorted by rank block, and one
    with the prefix of those items that a GPU's shard needs."""

    whole: TilePlan
    part: TilePlan
    """The plan with only the items of one shard's LoRA ranks."""


def by_rank_block(host: HostTiles) -> HostTiles:
    """Sort items by rank block, so that the items of a shard's ranks form a prefix."""
    return HostTiles(host.tiles, sorted(host.items, key=lambda item: item[3]), host.spans)


def sharded_plan(whole: TilePlan, items: int) -> ShardedPlan:
    """`items`: number of items in rank blocks below `part_blocks`."""
    tiles = replace(whole.tiles, items=whole.tiles.items[:items])
    return ShardedPlan(whole, replace(whole, tiles=tiles))


def part_blocks(R: int, shards: int) -> int:
    """Rank blocks of one GPU's shard of R LoRA ranks."""
    return -(-R // (shards * RANK_BLOCK))


class ShardedSlotLora(SlotLora):
    """`SlotLora` for fully sharded pairs: the table points at this GPU's shards, but `SiteTable.ranks` has whole
    ranks."""

    def __init__(
        self,
        tables: Mapping[SiteGroup, SiteTable],
        exchanges: Mapping[SiteGroup, Exchange],
        plan: ShardedPlan,
        groups: frozenset[int],
        biases: Biases | None = None,
    ) -> None:
        """`groups`, `biases`: see `SlotLora`. They must be equal on every GPU, as must the numbers of rows, tiles and
        ranks."""
        super().__init__(tables, plan.whole, groups, biases)
        self._exchanges, self._part = exchanges, plan.part

    def changes(self, group: SiteGroup) -> bool:
        return super().changes(group) and group in self._exchanges

    def _add(self, group: SiteGroup, ys: Sequence[Tensor], x_TD: Tensor, *, overlapped: bool) -> None:
        table, exchange = self._tables[group], self._exchanges[group]
        plan = self._part if exchange.shards > 1 else self.plan
        if exchange.outputs is not None:
            start, stop = exchange.outputs
            ys = [y[:, start:stop] for y in ys]
        if plan.decode:
            decode(ys, x_TD, plan, table, overlapped=overlapped, exchange=exchange)
            return
        h = prefill_shrink(x_TD, plan, table, shards=exchange.shards)
        h = exchange.run(h[None, None])[:, 0]
        prefill_expand(ys, ys, h if exchange.shards > 1 else h[0], plan, table, shards=exchange.shards)
