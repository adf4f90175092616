"""`segmented`: our Triton kernels. Tables are built once a step; then two launches serve all sites that read one input.

Decode batches (few rows per adapter) and larger ones (prefill, training) have kernels of their own; see
`decode_kernel`, `prefill_kernel` and `backward_kernel`. Any mix of ranks >= 1; an adapter's cost depends on its own
rank only.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coserve.kernels.lora.interface import Adapters, FixedLora, PreparedLora, TritonBackend
from coserve.kernels.lora.latent import HeadSizes
from coserve.kernels.lora.segmented import launch_prefill, linear_group, plan, terms
from coserve.kernels.lora.segmented.adapter_table import table_on
from coserve.kernels.lora.segmented.block_sizes import MAX_SITES
from coserve.kernels.lora.segmented.gradients import dense, gradients
from coserve.kernels.lora.segmented.launch_latent import add_terms
from coserve.kernels.lora.segmented.plan import CUTTING, Cutting, GroupTable, TilePlan
from coserve.kernels.lora.segmented.tiles import TrainingTiles
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import FrozenWeight, SiteGroup


class SegmentedBackend(TritonBackend):
    """The Triton backend with tables that are built for each step. Serving on a GPU uses fixed tables: `SlotLora`."""

    name = "segmented"
    capturable = True
    groups_inputs = True

    def __init__(self, cutting: Cutting = CUTTING) -> None:
        """`cutting`: which kernels serve which batches, and their block sizes."""
        self._cutting = cutting

    def prepare(self, segments: Segments, adapters: Adapters, groups: Sequence[SiteGroup]) -> SegmentedLora:
        self.refuse_adapters(adapters)
        return SegmentedLora(segments, adapters, groups, self._cutting)


@dataclass(frozen=True)
class _Launch:
    """The sites of a group that one launch serves."""

    live: list[int]
    """Indices in the group of the sites that an adapter with tokens changes."""
    table: GroupTable


class SegmentedLora(PreparedLora):
    """The tables of one step's groups, and the tile plan for each set of ranks."""

    def __init__(
        self, segments: Segments, adapters: Adapters, groups: Sequence[SiteGroup], cutting: Cutting = CUTTING
    ) -> None:
        self._cutting = cutting
        self._begin(segments)
        present = [adapters[index] for index in segments.runs]
        cuts: list[tuple[SiteGroup, list[int]]] = []
        for group in groups:
            live = [i for i, name in enumerate(group.names) if any(name in adapter for adapter in present)]
            cuts += [(group, live[first : first + MAX_SITES]) for first in range(0, len(live), MAX_SITES)]
        self._known = frozenset(groups)
        self._launches: dict[SiteGroup, list[_Launch]] = {}
        if not cuts:
            return
        pairs = [[[adapter.get(group.names[i]) for adapter in adapters] for i in live] for group, live in cuts]
        device = next(pair.a_RD.device for adapter in present for pair in adapter.values())
        tables = plan.tables_of(pairs, device)
        given = {id(pair) for group in pairs for site in group for pair in site if pair is not None}
        self._copied = any(id(pair) not in given for pair in tables[0].held)
        """Whether some pairs' weights were copied because kernels could not read them in place."""
        self._present = segments.runs.keys()
        for (group, live), table in zip(cuts, tables, strict=True):
            self._launches.setdefault(group, []).append(_Launch(live, table))
            self.anchor = table.anchor
        self._sizes = torch.cat([_sizes(table) for table in tables], 1)
        groups_live = tuple([(group, *live) for group, live in cuts])
        self._structure = (groups_live, self._sizes.numpy().tobytes(), tables[0].table.blocked, *self._present)

    @property
    def structure(self) -> Hashable | None:
        if not self._launches or self._copied or self.anchor is None:
            return None
        return self._structure

    def fixed(self) -> FixedSegmentedLora:
        return FixedSegmentedLora(self)

    def for_batch(self, segments: Segments) -> SegmentedLora | None:
        if not self._launches or self._copied or segments.runs.keys() != self._present:
            return None
        other = copy.copy(self)
        other._begin(segments)
        return other

    def _begin(self, segments: Segments) -> None:
        self._segments = segments
        self._plans: dict[tuple[tuple[int, ...], bool], TilePlan] = {}
        """Tile plans, by ranks and by whether they are for training."""

    def changes(self, group: SiteGroup) -> bool:
        return group in self._launches

    def add(self, group: SiteGroup, ys: Sequence[Tensor], x_TD: Tensor) -> list[Tensor]:
        x_TD = self._checked(group, x_TD)
        out = list(ys)
        for launch in self._launches.get(group, ()):
            live, table = launch.live, launch.table
            own = [out[i] for i in live]
            learned = (*table.a, *table.b) if table.anchor is None else (table.anchor,)
            if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*own, x_TD, *learned)):
                for i, y in zip(live, terms.train(own, x_TD, self._plan(table, train=True), table), strict=True):
                    out[i] = y
            else:
                terms.add_(own, x_TD, self._plan(table, train=False), table.table)
        return out

    def add_(self, group: SiteGroup, ys: Sequence[Tensor], x_TD: Tensor, *, overlapped: bool = False) -> None:
        x_TD = self._checked(group, x_TD)
        for launch in self._launches.get(group, ()):
            cut = self._plan(launch.table, train=False)
            terms.add_([ys[i] for i in launch.live], x_TD, cut, launch.table.table, overlapped=overlapped)

    def add_query_terms(self, group: SiteGroup, y_HTL: Tensor, q_HTN: Tensor, sizes: HeadSizes) -> None:
        self._add_latent(group, y_HTL, q_HTN, sizes, queries=True)

    def add_output_terms(self, group: SiteGroup, y_HTE: Tensor, x_HTL: Tensor, sizes: HeadSizes) -> None:
        self._add_latent(group, y_HTE, x_HTL, sizes, queries=False)

    def _add_latent(self, group: SiteGroup, y: Tensor, x: Tensor, sizes: HeadSizes, *, queries: bool) -> None:
        for launch in self._launches.get(group, ()):
            cut = self._plan(launch.table, train=False)
            add_terms(y, x, sizes, cut.tiles, launch.table.table, queries=queries)

    def linear_group(self, group: SiteGroup, x_TD: Tensor, stacked: FrozenWeight) -> tuple[Tensor, ...]:
        launches = self._launches.get(group)
        if launches is None:
            return super().linear_group(group, x_TD, stacked)
        (launch,) = launches
        cut = self._plan(launch.table, train=True)
        return linear_group.linear_group(self._checked(group, x_TD), stacked, cut, launch.table, launch.live)

    def linear_forward(
        self, group: SiteGroup, x_TD: Tensor, stacked: FrozenWeight, *, keep: bool
    ) -> tuple[Tensor, object]:
        assert group in self._known, f"expected a group that was prepared, got another of {group.names}"
        launches = self._launches.get(group)
        if launches is None:
            return super().linear_forward(group, x_TD, stacked, keep=keep)
        (launch,) = launches
        x_TD, cut = self._checked(group, x_TD), self._plan(launch.table, train=True)
        return linear_group.forward(x_TD, stacked, cut, launch.table, launch.live, keep=keep)

    def linear_backward(
        self, group: SiteGroup, dy_TO: Tensor, x_TD: Tensor, kept: object, stacked: FrozenWeight
    ) -> Tensor:
        launches = self._launches.get(group)
        if launches is None or not isinstance(kept, Tensor):
            return super().linear_backward(group, dy_TO, x_TD, kept, stacked)
        (launch,) = launches
        x_TD, cut = self._checked(group, x_TD), self._plan(launch.table, train=True)
        return linear_group.backward(dy_TO, x_TD, kept, stacked, cut, launch.table, launch.live)

    def terms_forward(self, group: SiteGroup, ys: Sequence[Tensor], x_TD: Tensor, *, keep: bool) -> Tensor | None:
        (launch,) = self._launches[group]
        cut, own = self._plan(launch.table, train=True), [ys[site] for site in launch.live]
        h_GTR = launch_prefill.prefill(own, own, self._checked(group, x_TD), cut, launch.table.table, keep=keep)
        return h_GTR if keep else None

    def terms_backward(self, group: SiteGroup, dys: Sequence[Tensor], x_TD: Tensor, kept: object) -> Tensor:
        assert isinstance(kept, Tensor), "expected a forward that kept its shrink"
        (launch,) = self._launches[group]
        assert launch.table.anchor is not None, "expected pairs with sums of gradients"
        own, cut = dense([dys[site] for site in launch.live]), self._plan(launch.table, train=True)
        x_TD = self._checked(group, x_TD)
        dx_TD, _ = gradients(own, x_TD, kept, cut, launch.table, inputs_need=True, weights_need=True)
        assert dx_TD is not None, "expected a gradient"
        return dx_TD

    def _checked(self, group: SiteGroup, x_TD: Tensor) -> Tensor:
        """Check the input; return x with dense rows."""
        expected = self._segments.tokens
        assert x_TD.shape[0] == expected, f"{group.names} saw {x_TD.shape[0]} rows, expected the step's {expected}"
        return x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()

    @property
    def _storage(self) -> Tensor:
        """Return the buffer that holds all tables."""
        storage = next(iter(self._launches.values()))[0].table.table.storage
        assert storage is not None, "expected tables of one step"
        return storage

    def _plan(self, table: GroupTable, *, train: bool) -> TilePlan:
        key = table.ranks, train
        found = self._plans.get(key)
        if found is None:
            device = table.table.ranks.device
            found = plan.plan_of(self._segments, table.ranks, device, train=train, cutting=self._cutting)
            self._plans[key] = found
        return found


class FixedSegmentedLora(SegmentedLora, FixedLora):
    """A training batch with tables at fixed addresses."""

    def __init__(self, like: SegmentedLora) -> None:
        """Copy `like`, which must have a `structure`."""
        vars(self).update(vars(like))
        storage = like._storage.clone()
        whole, first = (
            table_on(storage, like._sizes, blocked=next(iter(like._launches.values()))[0].table.table.blocked),
            0,
        )
        self._launches = {}
        for group, launches in like._launches.items():
            for launch in launches:
                table = replace(launch.table, table=whole.columns(first, len(launch.live)), a=[], b=[], held=[])
                self._launches.setdefault(group, []).append(_Launch(launch.live, table))
                first += len(launch.live)
        self._tiles: dict[tuple[int, ...], TrainingTiles] = {}
        self._plans = {}
        rows, tokens, device = plan.PREFILL_TILE_ROWS, like._segments.tokens, storage.device
        for ranks in {launch.table.ranks for launches in self._launches.values() for launch in launches}:
            own = TrainingTiles(rows, tokens, len(ranks), sum(rank > 0 for rank in ranks), device)
            own.load(plan.training_tiles(like._segments, ranks))
            self._tiles[ranks] = own
            self._plans[ranks, True] = TilePlan(own.tiles, plan.whole_ranks(ranks), False, self._cutting.prefill)
        self._source: SegmentedLora | None = like
        """The batch whose tables it holds; None: forgotten."""

    def take(self, lora: PreparedLora) -> None:
        assert isinstance(lora, SegmentedLora), f"expected a SegmentedLora, got {type(lora).__name__}"
        if self._source is None or lora._storage is not self._source._storage:
            self._storage.copy_(lora._storage)
        if lora._segments != self._segments:
            for ranks, own in self._tiles.items():
                own.load(plan.training_tiles(lora._segments, ranks))
        self._source, self._segments = lora, lora._segments

    def forget(self) -> None:
        self._source = None


def _sizes(table: GroupTable) -> Tensor:
    assert table.table.sizes is not None, "expected a table of one step"
    return table.table.sizes
