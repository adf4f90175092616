"""LoRA terms of a step whose adapters are in slots: built for one step, or in fixed buffers for a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from coserve.generate.execution.adapter_slots import AdapterSlots
from coserve.generate.execution.footprint import LoraFootprint
from coserve.generate.execution.graph_sizes import TileCapacity
from coserve.generate.sampling.transfer import send
from coserve.kernels.lora.experts.interface import RecordedTerms
from coserve.kernels.lora.experts.slot_terms import SlotExpertLora
from coserve.kernels.lora.interface import CombinedLora, PreparedLora
from coserve.kernels.lora.segmented import plan
from coserve.kernels.lora.segmented.adapter_table import RANK_BLOCK
from coserve.kernels.lora.segmented.plan import TilePlan
from coserve.kernels.lora.segmented.slot_lora import ShardedSlotLora, SlotLora, by_rank_block, part_blocks, sharded_plan
from coserve.kernels.lora.segmented.tiles import HostTiles, StepTiles, cut, upload
from coserve.kernels.lora.segments import Segments


def slot_lora(slots: AdapterSlots, segments: Segments) -> PreparedLora:
    """Build the terms of one step of any shape. `segments.adapters` are slots."""
    rows, decode = plan.tile_rows(segments)
    footprint = slots.footprint(segments)

    def plan_of(host: HostTiles) -> TilePlan:
        return TilePlan(upload(host, rows, segments.tokens, slots.device), footprint.max_rank, decode)

    slots_T = send(_tokens_slots(segments), slots.device) if footprint.experts else None
    local = plan_of(cut(segments, slots.local.ranks, rows)) if footprint.local else None
    if slots.sharded is None or not footprint.sharded:
        return _terms(slots, footprint, local, None, 0, slots_T)
    host = by_rank_block(cut(segments, slots.sharded.ranks, rows))
    blocks = _part_blocks(slots, footprint)
    return _terms(slots, footprint, local, plan_of(host), sum(block < blocks for _, _, _, block in host.items), slots_T)


def _tokens_slots(segments: Segments) -> Tensor:
    """Return the slot of each token, -1: none, as int32 (T) on the host."""
    lengths = [end - start for start, end in pairwise(segments.bounds)]
    return torch.repeat_interleave(torch.tensor(segments.adapters, dtype=torch.int32), torch.tensor(lengths))


class StaticSlotLora:
    """LoRA terms of steps of one size in fixed buffers: a graph keeps the addresses, `load` fills in the contents."""

    def __init__(
        self,
        slots: AdapterSlots,
        tokens: int,
        footprint: LoraFootprint,
        capacities: Sequence[TileCapacity],
        remote: RecordedTerms | None = None,
    ) -> None:
        """Allocate buffers for steps of up to `tokens` rows whose footprint `footprint` covers. `remote`: what LoRA
        servers compute, if the footprint has it."""
        self._slots, self._footprint, self._tokens = slots, footprint, tokens
        self._remote = remote if footprint.remote else None
        self.capacities = tuple(capacities)
        self._most = {each.rows: each for each in sorted(capacities, key=lambda each: each.tiles)}
        """Largest capacity, by rows per tile."""
        self._local = self._buffers(tokens) if footprint.local else None
        self._sharded = self._buffers(tokens) if footprint.sharded else None
        self._slots_T: Tensor | None = None
        if footprint.experts:
            self._slots_T = torch.full((tokens,), -1, dtype=torch.int32, device=slots.device)
        self._loaded_slots: Segments | None = None
        self._loaded: tuple[TileCapacity, list[HostTiles]] | None = None
        for capacity in self._most.values():
            self._put(capacity, [HostTiles([], [], [])] * 2)

    def within(self, capacity: TileCapacity) -> PreparedLora:
        """The terms of steps within `capacity`."""
        tiles, blocks = capacity.tiles, self._blocks(capacity)
        local, sharded = (
            None
            if own is None
            else TilePlan(own[capacity.rows].first(tiles, tiles * blocks), self._footprint.max_rank, capacity.decode)
            for own in (self._local, self._sharded)
        )
        parts = tiles * min(_part_blocks(self._slots, self._footprint), blocks) if sharded else 0
        found = _terms(self._slots, self._footprint, local, sharded, parts, self._slots_T)
        found.remote = self._remote
        return found

    def begin(self, segments: Segments) -> None:
        """Begin the step that is launched next, at the LoRA servers. Raises `LoraServerLost`."""
        if self._remote is not None:
            self._remote.begin(segments, self._slots.remote, self._tokens)

    def launched(self) -> None:
        """Note that it was launched."""
        if self._remote is not None:
            self._remote.launched()

    def load(self, segments: Segments) -> TileCapacity:
        """Load the next step's adapters, in stream order, and return the capacity that holds them.

        The caller ensures that the previous copy has ended.
        """
        sharded = self._slots.sharded
        ranks = [self._slots.local.ranks, [0] * len(self._slots.local.ranks) if sharded is None else sharded.ranks]
        capacity, hosts = fit_tiles(segments, ranks, self.capacities)
        if self._slots_T is not None and segments != self._loaded_slots:
            host_T = torch.full(self._slots_T.shape, -1, dtype=torch.int32)
            host_T[: segments.tokens] = _tokens_slots(segments)
            self._slots_T.copy_(send(host_T, self._slots_T.device), non_blocking=True)
            self._loaded_slots = segments
        if (capacity, hosts) != self._loaded:
            self._put(capacity, hosts)
            self._loaded = capacity, hosts
        return capacity

    def _blocks(self, capacity: TileCapacity) -> int:
        """Work items per tile, one for each `RANK_BLOCK` of the LoRA rank; the prefill kernels use none."""
        return self._footprint.max_rank // RANK_BLOCK if capacity.decode else 0

    def _buffers(self, tokens: int) -> dict[int, StepTiles]:
        return {
            rows: StepTiles(rows, most.tiles, most.tiles * self._blocks(most), tokens, self._slots.device)
            for rows, most in self._most.items()
        }

    def _put(self, capacity: TileCapacity, hosts: Sequence[HostTiles]) -> None:
        """Copy tiles into the fixed buffers. `hosts`: tiles of local pairs, then of fully sharded ones."""
        rows = capacity.rows
        for buffers, host in zip((self._local, self._sharded), hosts, strict=True):
            if buffers is not None and not capacity.decode:  # the prefill kernels know an idle tile by its slot
                idle = self._most[rows].tiles - len(host.tiles)
                buffers[rows].load(HostTiles([*host.tiles, *[(0, 0, -1, 0)] * idle], [], host.spans))
            elif buffers is not None:
                buffers[rows].load(by_rank_block(host) if buffers is self._sharded else host)


def fit_tiles(
    segments: Segments, ranks: Sequence[Sequence[int]], capacities: Sequence[TileCapacity]
) -> tuple[TileCapacity, list[HostTiles]]:
    """Return the first capacity that holds the segments, and their tiles. `ranks`: for each kind of pairs, the largest
    LoRA rank of each slot."""
    hosts: dict[int, list[HostTiles]] = {}
    for capacity in capacities:
        if capacity.rows not in hosts:
            hosts[capacity.rows] = [cut(segments, own, capacity.rows) for own in ranks]
        if all(len(host.tiles) <= capacity.tiles for host in hosts[capacity.rows]):
            return capacity, hosts[capacity.rows]
    raise AssertionError("expected a batch within the graph's capacity")


def _part_blocks(slots: AdapterSlots, footprint: LoraFootprint) -> int:
    shards = max(exchange.shards for exchange in slots.exchanges.values())
    return part_blocks(footprint.max_rank, shards)


def _terms(
    slots: AdapterSlots,
    footprint: LoraFootprint,
    local: TilePlan | None,
    sharded: TilePlan | None,
    part_items: int,
    slots_T: Tensor | None,
) -> PreparedLora:
    """`part_items`: items of `sharded` that this GPU's shard of the LoRA rank covers. `slots_T`: each token's slot, if
    the footprint has experts."""
    terms, biases = list[PreparedLora](), slots.biases if footprint.scaled else None
    if local is not None:
        terms.append(SlotLora(slots.local.tables, local, footprint.groups, biases))
    if sharded is not None:
        assert slots.sharded is not None, "expected slots of fully sharded pairs"
        cut = sharded_plan(sharded, part_items)
        terms.append(ShardedSlotLora(slots.sharded.tables, slots.exchanges, cut, footprint.groups, biases))
    found = terms[0] if len(terms) == 1 else CombinedLora(terms)
    if slots_T is not None:
        assert slots.experts is not None, "expected slots of experts"
        found.experts = SlotExpertLora(slots.experts.tables, slots_T, footprint.max_rank)
    return found
