"""Device slots for the adapters of running requests, at fixed addresses that CUDA graphs keep."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from coserve.core.types import AdapterRef
from coserve.generate.execution.footprint import LoraFootprint
from coserve.kernels.lora.exchange import Exchange
from coserve.kernels.lora.experts.slot_terms import ExpertSlots
from coserve.kernels.lora.segmented.adapter_table import RANK_BLOCK, SiteTable, SlotColumns, Slots, slot_columns
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair, SiteGroup
from coserve.lora.store.packing import PackedSites
from coserve.model.lora import LoraWeights
from coserve.model.parallel.lora import FullyShardedPair

Groups = Sequence[Sequence[SiteGroup]]
"""For each layer, its groups of sites that share an input (`FusedBase.groups`)."""


class PairSlots:
    """Table of one kind of LoRA pairs, by slot and site."""

    def __init__(self, groups: Groups, slots: int, device: torch.device) -> None:
        flat = [group for layer in groups for group in layer]
        self._table = Slots(slots, sum(len(group.names) for group in flat), device, blocked=False)
        self.ranks = [0] * slots
        """Largest LoRA rank in each slot; 0: the slot has no pair of this kind."""
        self.tables: dict[SiteGroup, SiteTable] = {}
        """Each group's columns: views of one table over all sites."""
        first = 0
        for group in flat:
            self.tables[group] = self._table.table(first, len(group.names))
            first += len(group.names)

    def put(self, slot: int, columns: SlotColumns, owner: object) -> None:
        """See `Slots.put`; may run out of memory."""
        self._table.put(slot, columns, owner)
        self.ranks[slot] = columns.largest

    def clear(self, slot: int) -> None:
        self._table.clear(slot)
        self.ranks[slot] = 0


class AdapterSlots:
    """A table of N adapters by all sites. An adapter keeps its slot until another needs it or its GPU copy is gone."""

    def __init__(
        self,
        groups: Groups,
        slots: int,
        device: torch.device,
        exchanges: Mapping[SiteGroup, Exchange] | None = None,
        biases: Mapping[str, Tensor | None] | None = None,
        experts: Sequence[str] = (),
    ) -> None:
        """`exchanges`: collectives of fully sharded pairs (`FusedBase.exchanges`); None: no adapter has such pairs.
        `biases`: of each site (`LoraSites.biases`); None: no adapter is DoRA. `experts`: names of the parameters of
        experts that adapters may change."""
        self._names = [name for layer in groups for group in layer for name in group.names]
        self._groups = {name: group.index for layer in groups for group in layer for name in group.names}
        self.all_groups = frozenset(self._groups.values())
        self.device = device
        self.local = PairSlots(groups, slots, device)
        """Pairs that each GPU computes without communication."""
        self.exchanges = exchanges or {}
        self.sharded = PairSlots(groups, slots, device) if self.exchanges else None
        """This GPU's shards of fully sharded pairs."""
        every = [group for layer in groups for group in layer]
        self.biases = {} if biases is None else {group: [biases[name] for name in group.names] for group in every}
        """The biases of each group's sites."""
        self.experts = ExpertSlots(experts, slots, device) if experts else None
        self.scaled = [False] * slots
        """Whether each slot's adapter is DoRA."""
        self.remote = [-1] * slots
        """The slot at LoRA servers of each slot's adapter; -1: it is not there."""
        self.groups: list[frozenset[int]] = [frozenset()] * slots
        """Site groups that each slot's adapter changes (`LoraFootprint.groups`)."""
        self._slots: OrderedDict[AdapterRef, int] = OrderedDict()  # least recently used first
        self._free = list(range(slots))

    def place(self, adapters: Mapping[AdapterRef, LoraWeights]) -> list[int]:
        """Return the slots of a step's adapters, placing those without one. `adapters`: their GPU copies, no more than
        there are slots."""
        for ref in adapters:
            if ref in self._slots:
                self._slots.move_to_end(ref)
        for ref, weights in adapters.items():
            if ref not in self._slots:
                self._put(ref, weights, adapters)
        return [self._slots[ref] for ref in adapters]

    def free(self, ref: AdapterRef) -> None:
        """Free the adapter's slot, if it has one: its GPU copy is gone."""
        slot = self._slots.pop(ref, None)
        if slot is not None:
            self.local.clear(slot)
            if self.sharded is not None and self.sharded.ranks[slot]:
                self.sharded.clear(slot)
            if self.experts is not None:
                self.experts.clear(slot)
            self.groups[slot], self.scaled[slot], self.remote[slot] = frozenset(), False, -1
            self._free.append(slot)

    def groups_of(self, names: Iterable[str]) -> frozenset[int]:
        """Return the site groups that an adapter with pairs of these names changes."""
        return frozenset(self._groups[name] for name in names if name in self._groups)

    def footprint(self, segments: Segments) -> LoraFootprint:
        """The LoRA footprint of a step; `max_rank` is a multiple of `RANK_BLOCK`. `segments.adapters` are slots."""
        present = [slot for slot in segments.adapters if slot >= 0]
        local = max((self.local.ranks[slot] for slot in present), default=0)
        sharded = 0 if self.sharded is None else max((self.sharded.ranks[slot] for slot in present), default=0)
        groups = frozenset[int]().union(*(self.groups[slot] for slot in present))
        experts = 0 if self.experts is None else max((self.experts.ranks[slot] for slot in present), default=0)
        blocks = -(-max(local, sharded, experts, 1) // RANK_BLOCK)
        scaled = any(self.scaled[slot] for slot in present)
        local_too = bool(local or not sharded)
        remote = any(self.remote[slot] >= 0 for slot in present)
        kinds = {"sharded": bool(sharded), "scaled": scaled, "experts": bool(experts), "remote": remote}
        return LoraFootprint(blocks * RANK_BLOCK, groups, local=local_too, **kinds)

    def _put(self, ref: AdapterRef, weights: LoraWeights, wanted: Mapping[AdapterRef, LoraWeights]) -> None:
        if not self._free:
            oldest = next(iter(self._slots))
            assert oldest not in wanted, "expected a slot for each adapter of a step"
            self.free(oldest)
        slot = self._free[-1]
        columns, owner = _columns(weights, self._names)
        sharded = frozenset[str]() if self.sharded is None else _fully_sharded(weights)
        if self.sharded is not None and sharded:
            at_G = torch.tensor([name in sharded for name in self._names])
            self.sharded.put(slot, columns.only(at_G), owner)
            columns = columns.only(~at_G)
        self.local.put(slot, columns, owner)
        self._slots[ref] = self._free.pop()
        if self.experts is not None and weights.experts:
            self.experts.put(slot, weights.experts)
        self.groups[slot] = self.groups_of(weights.sites)
        self.scaled[slot], self.remote[slot] = weights.settings.use_dora, weights.remote


def _columns(weights: LoraWeights, names: Sequence[str]) -> tuple[SlotColumns, object]:
    """Return an adapter's columns of the table, and the object that keeps its memory alive."""
    if isinstance(weights.sites, PackedSites) and weights.sites.layout.for_kernels:  # the store's GPU copies
        return weights.sites.columns(names), weights
    # Other copies on a GPU (`packed`) already store block-diagonal pairs with their zeros.
    pairs = [weights.sites.get(name) for name in names]
    return slot_columns([None if pair is None else pair.dense() for pair in pairs])


def _fully_sharded(weights: LoraWeights) -> frozenset[str]:
    """Names of the sites whose pairs are fully sharded."""
    pairs: Mapping[str, LoraPair] = weights.sites
    if isinstance(pairs, PackedSites):  # makes no views
        pairs = {name: place.like for name, place in pairs.layout.places.items()}
    return frozenset(name for name, pair in pairs.items() if isinstance(pair, FullyShardedPair))
