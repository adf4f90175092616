"""A packed batch cut into tiles, each with the slot of its rows' adapter."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from coserve.kernels.gpu.device import to_device
from coserve.kernels.lora.segmented.adapter_table import RANK_BLOCK
from coserve.kernels.lora.segments import Segments


@dataclass(frozen=True)
class Tiles:
    """A batch cut into tiles of at most `rows` rows of one adapter, in order of slot. int32, device."""

    rows: int
    tiles: Tensor
    """(N, 4): first row, rows (0: inactive), slot (-1: no adapter), rank blocks of the slot."""
    items: Tensor
    """(M, 4): first row, rows (0: inactive), slot, rank block. One for each rank block of each tile's adapter."""
    spans: Tensor
    """(A, 4): first tile, tiles, slot, 0. One for each adapter that has rows."""
    counters: Tensor
    """(T): zeros before and after each launch; programs that split a tile's sum count themselves in it."""


@dataclass(frozen=True)
class HostTiles:
    """`Tiles` on the host."""

    tiles: list[tuple[int, int, int, int]]
    items: list[tuple[int, int, int, int]]
    spans: list[tuple[int, int, int, int]]


def _rows(entries: Sequence[tuple[int, int, int, int]]) -> Tensor:
    """Return the entries as int32 (N, 4). `torch.tensor` would look at each tuple, which is several times slower."""
    flat = array("i", chain.from_iterable(entries))
    return torch.frombuffer(flat, dtype=torch.int32).view(-1, 4) if flat else torch.empty(0, 4, dtype=torch.int32)


def cut(segments: Segments, ranks: Sequence[int], rows: int) -> HostTiles:
    """Cut a batch into tiles of at most `rows` rows. `ranks` (slots): each adapter's largest rank among the sites that
    read these tiles."""
    tiles: list[tuple[int, int, int, int]] = []
    spans: list[tuple[int, int, int, int]] = []
    for slot, runs in sorted(segments.runs.items()):
        if not ranks[slot]:
            continue
        first, blocks = len(tiles), -(-ranks[slot] // RANK_BLOCK)
        for start, end in runs:
            if end - start <= rows:  # fast path for decodes, of which a step has hundreds
                tiles.append((start, end - start, slot, blocks))
            else:
                tiles.extend((row, min(rows, end - row), slot, blocks) for row in range(start, end, rows))
        spans.append((first, len(tiles) - first, slot, 0))
    items = [(start, length, slot, block) for start, length, slot, blocks in tiles for block in range(blocks)]
    return HostTiles(tiles, items, spans)


def base_only_tiles(segments: Segments, host: HostTiles, rows: int) -> list[tuple[int, int, int, int]]:
    """Return tiles with slot -1 for the rows that `host` leaves out. A kernel with a separate output copies these
    rows."""
    covered = sorted((start, start + length) for start, length, _, _ in host.tiles)
    tiles: list[tuple[int, int, int, int]] = []
    row = 0
    for start, end in [*covered, (segments.tokens, segments.tokens)]:
        tiles.extend((at, min(rows, start - at), -1, 0) for at in range(row, start, rows))
        row = end
    return tiles


def upload(host: HostTiles, rows: int, tokens: int, device: torch.device) -> Tiles:
    """Copy all three tables to the device at once."""
    parts = (host.tiles, host.items, host.spans)
    flat = to_device(_rows([entry for part in parts for entry in part]), device)
    first, second = len(host.tiles), len(host.tiles) + len(host.items)
    counters = torch.zeros(tokens, dtype=torch.int32, device=device)
    return Tiles(rows, flat[:first], flat[first:second], flat[second:], counters)


class TrainingTiles:
    """`Tiles` of a training batch at fixed addresses; `load` switches to a batch with equally many tokens and
    adapters."""

    def __init__(self, rows: int, tokens: int, adapters: int, spans: int, device: torch.device) -> None:
        """`adapters`: adapters of the batch; `spans`: how many of them have terms."""
        tiles = -(-tokens // rows) + adapters - 1  # each adapter's last tile may be shorter
        self._table = torch.zeros(tiles + spans, 4, dtype=torch.int32, device=device)
        self._count, self._device = tiles, device
        counters = torch.zeros(tokens, dtype=torch.int32, device=device)
        none = self._table[:0]
        self.tiles = Tiles(rows, self._table[:tiles], none, self._table[tiles:], counters)

    def load(self, host: HostTiles) -> None:
        """Copy a batch's tiles in stream order; the remaining tiles become inactive."""
        inactive = self._count - len(host.tiles)
        assert inactive >= 0 and len(host.spans) == self.tiles.spans.shape[0], "expected a batch of the same shape"
        entries = [*host.tiles, *[(0, 0, -1, 0)] * inactive, *host.spans]
        self._table.copy_(to_device(_rows(entries), self._device))


class StepTiles:
    """`Tiles` of fixed capacity and addresses for a captured graph: `load` fills them, and marks the rest inactive."""

    def __init__(self, rows: int, tiles: int, items: int, tokens: int, device: torch.device) -> None:
        self._table = torch.zeros(tiles + items, 4, dtype=torch.int32, device=device)
        self._host = torch.zeros(tiles + items, 4, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._tiles = tiles
        empty = torch.zeros(0, 4, dtype=torch.int32, device=device)
        counters = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.tiles = Tiles(rows, self._table[:tiles], self._table[tiles:], empty, counters)

    def fits(self, host: HostTiles) -> bool:
        return len(host.tiles) <= self._tiles and len(host.items) <= self._table.shape[0] - self._tiles

    def first(self, tiles: int, items: int) -> Tiles:
        """Return the first entries of the tables, for a graph that serves fewer tiles. `load` fills them too."""
        assert tiles <= self._tiles, f"expected at most {self._tiles} tiles, got {tiles}"
        whole = self.tiles
        return Tiles(whole.rows, whole.tiles[:tiles], whole.items[:items], whole.spans, whole.counters)

    def load(self, host: HostTiles) -> None:
        """Copies `host` in, in stream order. The caller ensures that the previous copy has ended."""
        assert self.fits(host), "expected a batch within the capacity"
        self._host.zero_()
        for first, part in ((0, host.tiles), (self._tiles, host.items)):
            if part:
                self._host[first : first + len(part)] = _rows(part)
        self._table.copy_(self._host, non_blocking=True)
