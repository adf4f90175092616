"""The LoRA terms of a step whose adapters lie in slots: built for one step, or in fixed buffers for a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence

from coserve.generate.execution.adapter_slots import AdapterSlots
from coserve.generate.execution.footprint import LoraFootprint
from coserve.generate.execution.graph_sizes import TileCapacity
from coserve.kernels.lora.segmented import plan
from coserve.kernels.lora.segmented.adapter_table import RANK_BLOCK
from coserve.kernels.lora.segmented.plan import TilePlan
from coserve.kernels.lora.segmented.slot_lora import SlotLora
from coserve.kernels.lora.segmented.tiles import HostTiles, StepTiles, cut, upload
from coserve.kernels.lora.segments import Segments


def slot_lora(slots: AdapterSlots, segments: Segments) -> SlotLora:
    """The terms of one step of any shape. `segments.adapters` are slots."""
    rows, decode = plan.tile_rows(segments)
    tiles = upload(cut(segments, slots.ranks, rows), rows, segments.tokens, slots.device)
    footprint = slots.footprint(segments)
    return SlotLora(slots.tables, TilePlan(tiles, footprint.max_rank, decode), footprint.groups)


class StaticSlotLora:
    """The LoRA terms of steps of one size in fixed buffers: a graph keeps the addresses, `load` sets the contents."""

    def __init__(
        self,
        slots: AdapterSlots,
        tokens: int,
        footprint: LoraFootprint,
        capacities: Sequence[TileCapacity],
        *,
        decode: bool,
    ) -> None:
        """For steps of up to `tokens` rows whose footprint `footprint` covers. `decode`: use the LoRA decode kernels."""
        self._slots, self._footprint, self._decode = slots, footprint, decode
        self._blocks = footprint.max_rank // RANK_BLOCK if decode else 0  # the prefill kernels use no items
        self.capacities = tuple(capacities)
        self._most: dict[int, int] = {}
        """Tiles, by rows of a tile."""
        for capacity in capacities:
            self._most[capacity.rows] = max(self._most.get(capacity.rows, 0), capacity.tiles)
        self._tiles = {
            rows: StepTiles(rows, tiles, tiles * self._blocks, tokens, slots.device)
            for rows, tiles in self._most.items()
        }
        self._loaded: tuple[TileCapacity, HostTiles] | None = None
        for rows in self._most:
            self._put(rows, HostTiles([], [], []))

    def within(self, capacity: TileCapacity) -> SlotLora:
        """The terms of steps that `capacity` holds."""
        tiles = self._tiles[capacity.rows].first(capacity.tiles, capacity.tiles * self._blocks)
        return SlotLora(
            self._slots.tables, TilePlan(tiles, self._footprint.max_rank, self._decode), self._footprint.groups
        )

    def load(self, segments: Segments) -> TileCapacity:
        """Loads the next step's adapters, in stream order, and gives the capacity that holds them.

        The caller ensures that the last copy has ended.
        """
        capacity, host = fit_tiles(segments, self._slots.ranks, self.capacities)
        if (capacity, host) != self._loaded:
            self._put(capacity.rows, host)
            self._loaded = capacity, host
        return capacity

    def _put(self, rows: int, host: HostTiles) -> None:
        if not self._decode:  # the prefill kernels know an idle tile by its slot
            idle = self._most[rows] - len(host.tiles)
            host = HostTiles([*host.tiles, *[(0, 0, -1, 0)] * idle], [], host.spans)
        self._tiles[rows].load(host)


def fit_tiles(
    segments: Segments, ranks: Sequence[int], capacities: Sequence[TileCapacity]
) -> tuple[TileCapacity, HostTiles]:
    """The first capacity that holds the segments, and their tiles. `ranks`: each slot's largest."""
    hosts: dict[int, HostTiles] = {}
    for capacity in capacities:
        if capacity.rows not in hosts:
            hosts[capacity.rows] = cut(segments, ranks, capacity.rows)
        if len(hosts[capacity.rows].tiles) <= capacity.tiles:
            return capacity, hosts[capacity.rows]
    raise AssertionError("expected a batch within the graph's capacity")
