"""Where the adapters of running requests lie on the device, so that captured graphs find them: one slot an adapter."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.kernels.lora.segmented import plan, terms
from coserve.kernels.lora.segmented.adapter_table import RANK_BLOCK, SiteTable, Slots
from coserve.kernels.lora.segmented.plan import PREFILL_TILE_ROWS, TilePlan
from coserve.kernels.lora.segmented.tiles import HostTiles, StepTiles, Tiles, cut, upload
from coserve.kernels.lora.segments import Segments
from coserve.model.fused import AddsLora
from coserve.model.lora import LoraWeights

DECODE_ROWS = (8, 16)
"""Rows of low and of tall tiles of decode steps."""
SMALL_STEP = 256
"""Tokens up to which a step with prompts goes to the decode kernels as a graph, whatever its longest run is: a tile of 64
rows takes as long with one of them."""
PROMPT_ADAPTERS = (8, 32, 96)
"""Adapters in a step with prompts that graphs are captured for, beside one for each sequence. Idle tiles take time."""
WIDTHS = (16, 32, 64, 128, 256)
"""Ranks that graphs are captured for; one serves every rank up to its own. Larger ranks go without a graph."""

Groups = Sequence[Sequence[Sequence[str]]]
"""For each layer, its sites that share an input (`FusedBase.groups`)."""


@dataclass(frozen=True)
class Scope:
    """What the adapters of a step change; a graph launches nothing for the rest."""

    width: int
    """Their largest rank, rounded up; 0: no adapters."""
    groups: frozenset[int]
    """Indices, in any layer, of the groups of sites that any of them changes."""

    def covers(self, other: Scope) -> bool:
        return self.width >= other.width and self.groups >= other.groups


NO_ADAPTERS = Scope(0, frozenset())


class AdapterSlots:
    """A table of N adapters by all sites. A slot stays with its adapter until another needs it or the adapter is gone."""

    def __init__(self, groups: Groups, slots: int, device: torch.device) -> None:
        self._names = [name for layer in groups for group in layer for name in group]
        self._groups = {name: index for layer in groups for index, group in enumerate(layer) for name in group}
        self.all_groups = frozenset(self._groups.values())
        self._table = Slots(slots, len(self._names), device)
        self.device = device
        self.ranks = [0] * slots
        """Each slot's largest rank; 0: empty."""
        self.groups: list[frozenset[int]] = [frozenset()] * slots
        """Those that each slot's adapter changes (`Scope.groups`)."""
        self._slots: OrderedDict[int, int] = OrderedDict()  # id of weights -> slot, least recently used first
        self._weights: dict[int, weakref.ref[LoraWeights]] = {}
        self._free = list(range(slots))
        self._gone: list[int] = []
        first, views = 0, list[list[SiteTable]]()
        for layer in groups:
            own: list[SiteTable] = []
            for group in layer:
                own.append(self._table.table(first, len(group)))
                first += len(group)
            views.append(own)
        self.tables = views
        """By layer and group."""

    def place(self, adapters: Sequence[LoraWeights]) -> list[int]:
        """The slot of each of a step's adapters, which are no more than there are slots."""
        self._sweep()
        found = []
        for weights in adapters:
            key = id(weights)
            if key in self._slots:
                self._slots.move_to_end(key)
        for weights in adapters:
            slot = self._slots.get(id(weights))
            found.append(self._put(weights, adapters) if slot is None else slot)
        return found

    def _put(self, weights: LoraWeights, wanted: Sequence[LoraWeights]) -> int:
        if not self._free:
            oldest = next(iter(self._slots))
            assert all(id(other) != oldest for other in wanted), "expected a slot for each adapter of a step"
            self._release(oldest)
        slot, key = self._free.pop(), id(weights)
        self._table.put(slot, [weights.sites.get(name) for name in self._names])
        self.ranks[slot] = max((pair.rank for pair in weights.sites.values()), default=0)
        self.groups[slot] = frozenset(self._groups[name] for name in weights.sites)
        self._slots[key] = slot
        self._weights[key] = weakref.ref(weights, lambda _: self._gone.append(key))
        return slot

    def _sweep(self) -> None:
        """Forget adapters that left memory: a slot would keep theirs."""
        while self._gone:
            self._release(self._gone.pop())

    def _release(self, key: int) -> None:
        slot = self._slots.pop(key, None)
        if slot is None:
            return
        del self._weights[key]
        self._table.clear(slot)
        self.ranks[slot], self.groups[slot] = 0, frozenset()
        self._free.append(slot)


class SlotLora(AddsLora):
    """The LoRA terms of a step whose segments name slots."""

    def __init__(self, slots: AdapterSlots, plan: TilePlan, groups: frozenset[int]) -> None:
        """`groups`: that the step's adapters change."""
        self._tables, self._plan, self._groups = slots.tables, plan, groups

    def changes(self, group: int) -> bool:
        """See `AddsLora`."""
        return group in self._groups

    def add_(self, layer: int, group: int, ys: Sequence[Tensor], x_TD: Tensor, *, beside: bool) -> None:
        """See `AddsLora`. The launches themselves: the op around us is opaque to the compiler already."""
        terms.add_(ys, x_TD, self._plan, self._tables[layer][group], overlapped=beside)

    def tables(self, layer: int, group: int) -> tuple[Tiles, SiteTable, int] | None:
        """See `AddsLora`."""
        return (self._plan.tiles, self._tables[layer][group], self._plan.R) if self._plan.decode else None


def slot_lora(slots: AdapterSlots, segments: Segments) -> SlotLora:
    """The terms of one step of any shape. `segments.adapters` are slots."""
    rows, decode = plan.tile_rows(segments)
    host = cut(segments, slots.ranks, rows)
    scope = scope_of(slots, segments)
    return SlotLora(
        slots, TilePlan(upload(host, rows, segments.tokens, slots.device), scope.width, decode), scope.groups
    )


def scope_of(slots: AdapterSlots, segments: Segments) -> Scope:
    """What the step changes; its width is a multiple of `RANK_BLOCK`."""
    present = [slot for slot in segments.adapters if slot >= 0]
    most = max((slots.ranks[slot] for slot in present), default=1)
    groups = frozenset[int]().union(*(slots.groups[slot] for slot in present))
    return Scope(max(1, -(-most // RANK_BLOCK)) * RANK_BLOCK, groups)


@dataclass(frozen=True)
class Room:
    """What a graph has room for."""

    rows: int
    """Rows of a tile."""
    tiles: int


class StaticLora:
    """The LoRA terms of steps of one size in fixed buffers: a graph keeps the addresses, `load` the contents."""

    def __init__(self, slots: AdapterSlots, tokens: int, scope: Scope, rooms: Sequence[Room], *, decode: bool) -> None:
        """For steps of up to `tokens` rows that `scope` covers. `decode`: by the kernels for few rows an adapter."""
        self._slots, self._scope, self._decode = slots, scope, decode
        self._blocks = scope.width // RANK_BLOCK if decode else 0  # others have no items
        self.rooms = tuple(rooms)
        most: dict[int, int] = {}
        for room in rooms:
            most[room.rows] = max(most.get(room.rows, 0), room.tiles)
        self._tiles = {
            rows: StepTiles(rows, tiles, tiles * self._blocks, tokens, slots.device) for rows, tiles in most.items()
        }
        self._most = most
        self._loaded: tuple[Room, HostTiles] | None = None
        for rows in most:
            self._put(rows, HostTiles([], [], []))

    def within(self, room: Room) -> SlotLora:
        """The terms of steps that the room holds."""
        tiles = self._tiles[room.rows].first(room.tiles, room.tiles * self._blocks)
        return SlotLora(self._slots, TilePlan(tiles, self._scope.width, self._decode), self._scope.groups)

    def load(self, segments: Segments) -> Room:
        """What the next step adds, in stream order; the room that holds it. The last copy has ended."""
        room, host = settled(segments, self._slots.ranks, self.rooms)
        if (room, host) != self._loaded:
            self._put(room.rows, host)
            self._loaded = room, host
        return room

    def _put(self, rows: int, host: HostTiles) -> None:
        if not self._decode:  # the long kernels know an idle tile by its slot
            idle = self._most[rows] - len(host.tiles)
            host = HostTiles([*host.tiles, *[(0, 0, -1, 0)] * idle], [], host.spans)
        self._tiles[rows].load(host)


def prompt_rooms(tokens: int, sequences: int) -> tuple[Room, ...]:
    """What to capture graphs of steps with prompts for, of up to `tokens` rows of so many sequences.

    A tile has one adapter's rows, so that there is one that is not full for each adapter, at most.
    """
    small = tokens <= SMALL_STEP
    rows = DECODE_ROWS[0] if small else PREFILL_TILE_ROWS
    whole = -(-tokens // rows)
    most = min(whole + sequences - 1, tokens)
    some = [whole + adapters for adapters in PROMPT_ADAPTERS if small or whole < 2 * adapters]
    return tuple(Room(rows, tiles) for tiles in (*(tiles for tiles in some if tiles < most), most))


def decode_rooms(batch: int) -> tuple[Room, ...]:
    """What to capture graphs of decode steps of up to `batch` rows for, least work first: a program costs its launch for an empty tile too.

    Tall tiles for as many rows as one adapter's can be; low ones from there, doubled up to a tile for each of the rows.
    """
    low, tall = DECODE_ROWS
    found = [Room(low, -(-batch // low))]
    while found[-1].tiles < batch:
        found.append(Room(low, min(2 * found[-1].tiles, batch)))
    return (Room(tall, -(-batch // tall)), *found) if batch > low else tuple(found)


def settled(segments: Segments, ranks: Sequence[int], choice: Sequence[Room]) -> tuple[Room, HostTiles]:
    """The first of the rooms that holds the segments, and their tiles. `ranks`: each slot's largest."""
    hosts: dict[int, HostTiles] = {}
    for room in choice:
        if room.rows not in hosts:
            hosts[room.rows] = cut(segments, ranks, room.rows)
        if len(hosts[room.rows].tiles) <= room.tiles:
            return room, hosts[room.rows]
    raise AssertionError("expected a batch within the bucket")
