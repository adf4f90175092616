"""What the segmented kernels read from the device: where each adapter lies, and which rows are whose.

Both tables have fixed addresses and free contents, so that a captured CUDA graph can serve other adapters and batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from coserve.kernels.segments import VECTOR, Entry, LoraPair, Segments, lies_well

RANK_BLOCK = 16
"""Ranks are worked on in blocks of so many: the least that a tensor core multiplies."""
NO_ENTRY = Entry(0, 0, 0, 0, 0, 0.0)


@dataclass(frozen=True)
class SiteTable:
    """What G sites hold in each of N slots. A slot is one adapter; sites of one launch read one input of D features."""

    addresses: Tensor
    """int64 (N, G, 2): of a_RD and of b_OR, both contiguous."""
    ranks: Tensor
    """int32 (N, G); 0: the slot's adapter does not change the site."""
    scalings: Tensor
    """float32 (N, G)."""
    starts: Tensor | None = None
    """int32 (N, G): the ranks of the slots ahead, summed; only where gradients are wanted."""
    sums: Tensor | None = None
    """int64 (N, G, 2): the addresses of the `MainGrads`; 0: none."""
    sizes: Tensor | None = None
    """What is in `ranks`, on the host; only where it cannot change."""

    @property
    def sites(self) -> int:
        return self.ranks.shape[1]

    @property
    def slots(self) -> int:
        return self.ranks.shape[0]

    def columns(self, first: int, count: int) -> SiteTable:
        """What `count` neighbouring sites hold, as a view."""
        part = slice(first, first + count)
        rest = (None if own is None else own[:, part] for own in (self.starts, self.sums, self.sizes))
        return SiteTable(self.addresses[:, part], self.ranks[:, part], self.scalings[:, part], *rest)


class Slots:
    """A page table of adapters: N slots by all the sites of a base, on the device.

    `put` takes effect in stream order. A kernel reads the table and the weights before the kernel ahead of it has
    ended (programmatic dependent launch), so no kernel that writes weights may stand directly before a LoRA kernel.
    """

    def __init__(self, slots: int, sites: int, device: torch.device) -> None:
        self.addresses = torch.zeros(slots, sites, 2, dtype=torch.int64, device=device)
        self.ranks = torch.zeros(slots, sites, dtype=torch.int32, device=device)
        self.scalings = torch.zeros(slots, sites, dtype=torch.float32, device=device)
        self._held: dict[int, tuple[LoraPair | None, ...]] = {}

    def put(self, slot: int, pairs: Sequence[LoraPair | None]) -> None:
        """Point `slot` at one adapter's pairs, one a site; keeps them alive. They must be contiguous and aligned."""
        assert len(pairs) == self.ranks.shape[1], f"expected {self.ranks.shape[1]} sites, got {len(pairs)}"
        kept = tuple(None if pair is None else readable(pair) for pair in pairs)
        a, b, _, _, ranks, scalings = zip(*map(_entry, kept), strict=True)
        self.addresses[slot].copy_(torch.tensor([a, b], dtype=torch.int64).T)
        self.ranks[slot].copy_(torch.tensor(ranks, dtype=torch.int32))
        self.scalings[slot].copy_(torch.tensor(scalings))
        self._held[slot] = kept

    def clear(self, slot: int) -> None:
        """Empty `slot`: tokens that still name it get the base alone."""
        self.ranks[slot].zero_()
        self._held.pop(slot, None)

    def table(self, first: int, count: int) -> SiteTable:
        """The columns of `count` neighbouring sites, as a view: later `put`s show in it."""
        return SiteTable(self.addresses, self.ranks, self.scalings).columns(first, count)


def site_table(pairs: Sequence[Sequence[LoraPair | None]], device: torch.device) -> tuple[SiteTable, list[LoraPair]]:
    """A table for one step: `pairs[g][n]` at site g in slot n. Also the pairs it points at, which must stay alive.

    Never waits for the device.
    """
    slots, sites = len(pairs[0]), len(pairs)
    kept = [None if pair is None else readable(pair) for slot in zip(*pairs, strict=True) for pair in slot]
    a, b, sum_a, sum_b, ranks, scalings_ = zip(*map(_entry, kept), strict=True)
    sizes = torch.tensor(ranks, dtype=torch.int32).view(slots, sites)
    scalings = torch.tensor(scalings_, dtype=torch.float32)
    addresses, sums = (torch.tensor(both, dtype=torch.int64).T.contiguous() for both in ((a, b), (sum_a, sum_b)))
    starts = sizes.cumsum(0, dtype=torch.int32) - sizes
    columns = [column.view(torch.int32).view(-1) for column in (addresses, sums, sizes, scalings, starts)]
    padded = [pad(column, (0, -len(column) % VECTOR)) for column in columns]  # each begins at a whole vector
    moved = torch.split(_to_device(torch.cat(padded), device), [len(column) for column in padded])
    at = [column[: len(before)] for column, before in zip(moved, columns, strict=True)]
    table = SiteTable(
        at[0].view(torch.int64).view(slots, sites, 2),
        at[2].view(slots, sites),
        at[3].view(torch.float32).view(slots, sites),
        at[4].view(slots, sites),
        at[1].view(torch.int64).view(slots, sites, 2),
        sizes,
    )
    return table, [pair for pair in kept if pair is not None]


def _to_device(host: Tensor, device: torch.device) -> Tensor:
    """One copy that nobody waits for."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def readable(pair: LoraPair) -> LoraPair:
    """The pair as the kernels read it: itself, or a copy where a tensor is not contiguous and aligned.

    b_OR's rows are padded with zeros to whole vectors of 8, so an odd rank is a copy too, of (O, R rounded up).
    """
    if pair.entry is not None:
        return pair
    b_OR = pad(pair.b_OR.detach(), (0, -pair.rank % VECTOR)) if pair.rank % VECTOR else pair.b_OR
    return replace(pair, a_RD=_well(pair.a_RD), b_OR=_well(b_OR))


def _well(weight: Tensor) -> Tensor:
    return weight if lies_well(weight) else weight.detach().clone(memory_format=torch.contiguous_format)


def _entry(pair: LoraPair | None) -> Entry:
    """Of a pair that is readable."""
    if pair is None:
        return NO_ENTRY
    assert pair.entry is not None, "expected a readable pair"
    return pair.entry


@dataclass(frozen=True)
class Tiles:
    """A batch cut into tiles of at most `rows` rows of one adapter, in order of slot. int32, device."""

    rows: int
    tiles: Tensor
    """(N, 4): first row, rows (0: inactive), slot (-1: no adapter), rank blocks of the slot."""
    items: Tensor
    """(M, 4): first row, rows (0: inactive), slot, rank block. One for each RANK_BLOCK of each tile's adapter."""
    spans: Tensor
    """(A, 4): first tile, tiles, slot, 0. One for each adapter that has rows."""
    counters: Tensor
    """(T): zeros, and zeros again after each launch; what programs of one launch wait on."""


@dataclass(frozen=True)
class HostTiles:
    """`Tiles` before they go to the device."""

    tiles: list[tuple[int, int, int, int]]
    items: list[tuple[int, int, int, int]]
    spans: list[tuple[int, int, int, int]]


def cut(segments: Segments, ranks: Sequence[int], rows: int) -> HostTiles:
    """Tiles of at most `rows` rows; `ranks` (slots) is each adapter's largest rank among the sites that will read this."""
    tiles: list[tuple[int, int, int, int]] = []
    spans: list[tuple[int, int, int, int]] = []
    for slot, runs in sorted(segments.runs().items()):
        if not ranks[slot]:
            continue
        first, blocks = len(tiles), -(-ranks[slot] // RANK_BLOCK)
        for start, end in runs:
            tiles.extend((row, min(rows, end - row), slot, blocks) for row in range(start, end, rows))
        spans.append((first, len(tiles) - first, slot, 0))
    items = [(start, length, slot, block) for start, length, slot, blocks in tiles for block in range(blocks)]
    return HostTiles(tiles, items, spans)


def uncovered(segments: Segments, host: HostTiles, rows: int) -> list[tuple[int, int, int, int]]:
    """Tiles with slot -1 for the rows that `host` leaves out: what a kernel that writes a fresh output must copy."""
    covered = sorted((start, start + length) for start, length, _, _ in host.tiles)
    tiles: list[tuple[int, int, int, int]] = []
    row = 0
    for start, end in [*covered, (segments.tokens, segments.tokens)]:
        tiles.extend((at, min(rows, start - at), -1, 0) for at in range(row, start, rows))
        row = end
    return tiles


def upload(host: HostTiles, rows: int, tokens: int, device: torch.device) -> Tiles:
    """One copy to the device for all three tables."""
    parts = (host.tiles, host.items, host.spans)
    flat = _to_device(torch.tensor([entry for part in parts for entry in part], dtype=torch.int32).view(-1, 4), device)
    first, second = len(host.tiles), len(host.tiles) + len(host.items)
    counters = torch.zeros(tokens, dtype=torch.int32, device=device)
    return Tiles(rows, flat[:first], flat[first:second], flat[second:], counters)


class StepTiles:
    """`Tiles` of fixed room and addresses for a captured graph: `load` fills them, and marks the rest inactive."""

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
        """The beginnings of the tables: what a graph reads that serves fewer tiles. `load` fills these too."""
        assert tiles <= self._tiles, f"expected at most {self._tiles} tiles, got {tiles}"
        whole = self.tiles
        return Tiles(whole.rows, whole.tiles[:tiles], whole.items[:items], whole.spans, whole.counters)

    def load(self, host: HostTiles) -> None:
        """Copies `host` in, in stream order. The caller sees to it that the last copy has ended."""
        assert self.fits(host), "expected a batch within the bucket"
        self._host.zero_()
        for first, part in ((0, host.tiles), (self._tiles, host.items)):
            if part:
                self._host[first : first + len(part)] = torch.tensor(part, dtype=torch.int32)
        self._table.copy_(self._host, non_blocking=True)
