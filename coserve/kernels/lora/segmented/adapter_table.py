"""Device tables of adapters: the addresses of their matrices, by slot and site.

A table's own address is fixed and its contents may change, so that a captured CUDA graph can serve other adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from coserve.core.limits import MAX_IMPORTED_RANK
from coserve.kernels.gpu.device import put, to_device
from coserve.kernels.lora.types import VECTOR, LoraPair, TableEntry, is_aligned

RANK_BLOCK = 16
"""LoRA ranks per block, the fewest that a tensor core multiplies."""
NO_ENTRY = TableEntry(0, 0, 0, 0, 0, 0.0)


@dataclass(frozen=True)
class SiteTable:
    """A table of G sites by N slots. A slot holds one adapter; the sites of one launch read one input of D features."""

    addresses: Tensor
    """int64 (N, G, 2): addresses of a_RD and b_OR, both contiguous."""
    ranks: Tensor
    """int32 (N, G): `TableEntry.shape`, which is the rank of a dense pair; 0: the slot's adapter does not change the
    site."""
    scalings: Tensor
    """float32 (N, G): scalings."""
    starts: Tensor | None = None
    """int32 (N, G, 2): prefix sums over slots of the stored entries per column of A and per row of B; only for
    training.

    An entry count is the LoRA rank divided by the matrix's blocks.
    """
    sums: Tensor | None = None
    """int64 (N, G, 2): addresses of the `MainGrads`; 0: none."""
    sizes: Tensor | None = None
    """int32 (N, G, 3) on the host: the LoRA ranks, and the two counts that `starts` sums. None if the table's contents
    may change."""
    blocked: bool = True
    """Whether the table may hold block-diagonal pairs: a constant of the kernels, which are leaner without them."""
    scales: Tensor | None = None
    """int64 (N, G): addresses of DoRA's scales, fp32; 0: none. The field is None in tables of one step."""
    storage: Tensor | None = None
    """int32 (N): the device buffer that holds the columns of a `site_table`."""

    _views: dict[int, SiteTable] = field(default_factory=dict, compare=False, repr=False)

    def from_site(self, first: int) -> SiteTable:
        """Return the columns from one site on. Cached, because making views costs the host time."""
        if not first:
            return self
        if first not in self._views:
            self._views[first] = self.columns(first, self.sites - first)
        return self._views[first]

    @property
    def sites(self) -> int:
        return self.ranks.shape[1]

    @property
    def slots(self) -> int:
        return self.ranks.shape[0]

    def columns(self, first: int, count: int) -> SiteTable:
        """Return the columns of `count` neighbouring sites, as a view."""
        part = slice(first, first + count)
        given = self.starts, self.sums, self.sizes, self.scales
        starts, sums, sizes, scales = (None if own is None else own[:, part] for own in given)
        own = self.addresses[:, part], self.ranks[:, part], self.scalings[:, part]
        return SiteTable(*own, starts, sums, sizes, self.blocked, scales, self.storage)


@dataclass(frozen=True)
class SlotColumns:
    """One adapter's row of `Slots`, on the host: one entry for each of G sites. Zeros where it has no pair."""

    addresses: Tensor
    """int64 (G, 2): of A and B."""
    ranks: Tensor
    """int32 (G): rank, with the blocks of block-diagonal pairs packed in (`TableEntry.shape`)."""
    scalings: Tensor
    """float32 (G)."""
    scales: Tensor
    """int64 (G): addresses of DoRA's scales; 0: none."""
    largest: int
    """The largest of `ranks`."""

    @classmethod
    def of(cls, entries: Sequence[TableEntry]) -> SlotColumns:
        """Make the columns from one entry per site."""
        a, b, _, _, ranks, scalings, scales = zip(*entries, strict=True)
        return cls(
            torch.tensor([a, b], dtype=torch.int64).T.contiguous(),
            torch.tensor(ranks, dtype=torch.int32),
            torch.tensor(scalings, dtype=torch.float32),
            torch.tensor(scales, dtype=torch.int64),
            max(ranks),
        )

    def at(self, base: int) -> SlotColumns:
        """Turn offsets into addresses in memory that begins at `base`. Scales' offsets have 1 added: 0 means none."""
        return replace(
            self,
            addresses=torch.where(self.ranks[:, None] > 0, self.addresses + base, 0),
            scales=torch.where(self.scales > 0, self.scales + (base - 1), 0),
        )

    def only(self, sites_G: Tensor) -> SlotColumns:
        """Return only the pairs at sites where `sites_G` (bool) is true."""
        ranks = self.ranks * sites_G
        return SlotColumns(
            self.addresses * sites_G[:, None],
            ranks,
            self.scalings * sites_G,
            self.scales * sites_G,
            int(ranks.max()),
        )


class Slots:
    """The table of all sites of a base by N slots, which serving keeps on the device.

    `put` takes effect in stream order. A LoRA kernel reads the table and the weights before the preceding kernel has
    ended (programmatic dependent launch), so no kernel that writes weights may directly precede one.
    """

    def __init__(self, slots: int, sites: int, device: torch.device, *, blocked: bool = True) -> None:
        """`blocked`: whether block-diagonal pairs may be put."""
        self._blocked = blocked
        self.addresses = torch.zeros(slots, sites, 2, dtype=torch.int64, device=device)
        self.ranks = torch.zeros(slots, sites, dtype=torch.int32, device=device)
        self.scalings = torch.zeros(slots, sites, dtype=torch.float32, device=device)
        self.scales = torch.zeros(slots, sites, dtype=torch.int64, device=device)
        self._held: dict[int, object] = {}

    def put(self, slot: int, columns: SlotColumns, owner: object) -> None:
        """Point `slot` at one adapter's matrices, and keep their `owner` alive. Does not wait for the device."""
        sites = self.ranks.shape[1]
        assert len(columns.ranks) == sites, f"expected {sites} sites, got {len(columns.ranks)}"
        assert self._blocked or columns.largest <= MAX_IMPORTED_RANK, "expected dense pairs"
        put(columns.addresses, self.addresses[slot])
        put(columns.ranks, self.ranks[slot])
        put(columns.scalings, self.scalings[slot])
        put(columns.scales, self.scales[slot])
        self._held[slot] = owner

    def clear(self, slot: int) -> None:
        """Empty `slot`: tokens that still name it get no LoRA terms."""
        self.ranks[slot].zero_()
        self.scales[slot].zero_()
        self._held.pop(slot, None)

    def table(self, first: int, count: int) -> SiteTable:
        """Return the columns of `count` neighbouring sites, as a view that reflects later `put`s."""
        whole = SiteTable(self.addresses, self.ranks, self.scalings, blocked=self._blocked, scales=self.scales)
        return whole.columns(first, count)


def site_table(pairs: Sequence[Sequence[LoraPair | None]], device: torch.device) -> tuple[SiteTable, list[LoraPair]]:
    """Make a table for one step, `pairs[g][n]` at site g in slot n. Also return the pairs whose addresses it holds:
    keep them alive.

    Does not synchronize with the device.
    """
    slots, sites = len(pairs[0]), len(pairs)
    own = [pair for slot in zip(*pairs, strict=True) for pair in slot]
    entries, kept = table_entries(own)
    a, b, sum_a, sum_b, shapes_, scalings_, _ = zip(*entries, strict=True)
    shapes, sizes = torch.tensor(shapes_, dtype=torch.int32), torch.tensor(list(map(_sizes, own)), dtype=torch.int32)
    sizes = sizes.view(slots, sites, 3)
    scalings = torch.tensor(scalings_, dtype=torch.float32)
    addresses, sums = (torch.tensor(both, dtype=torch.int64).T.contiguous() for both in ((a, b), (sum_a, sum_b)))
    starts = (sizes.cumsum(0, dtype=torch.int32) - sizes)[..., 1:].contiguous()
    columns = [column.view(torch.int32).view(-1) for column in (addresses, sums, shapes, scalings, starts)]
    padded = [pad(column, (0, -len(column) % VECTOR)) for column in columns]  # each begins at a whole vector
    storage = to_device(torch.cat(padded), device)
    table = table_on(storage, sizes, blocked=any(pair.blocks > 1 for pair in kept))
    return table, kept


def table_on(storage: Tensor, sizes: Tensor, *, blocked: bool) -> SiteTable:
    """Return the table whose columns lie in `storage`, in the layout of `site_table`."""
    slots, sites, _ = sizes.shape
    pairs = slots * sites
    lengths = [4 * pairs, 4 * pairs, pairs, pairs, 2 * pairs]
    moved = torch.split(storage, [length + -length % VECTOR for length in lengths])
    addresses, sums, ranks, scalings, starts = [column[:length] for column, length in zip(moved, lengths, strict=True)]
    return SiteTable(
        addresses.view(torch.int64).view(slots, sites, 2),
        ranks.view(slots, sites),
        scalings.view(torch.float32).view(slots, sites),
        starts.view(slots, sites, 2),
        sums.view(torch.int64).view(slots, sites, 2),
        sizes,
        blocked=blocked,
        storage=storage,
    )


def kernel_layout(pair: LoraPair) -> LoraPair:
    """Return the pair in the kernels' layout: the pair itself, or a copy if a tensor is not contiguous and aligned.

    b_OR's rows are padded with zeros to whole vectors of 8, so pairs of odd rank are copied, to (O, R rounded up). So
    are block-diagonal matrices whose blocks have an odd width (`_whole_vectors`).
    """
    if pair.entry is not None:
        return pair
    a_RD = _whole_vectors(pair.a_RD, pair.a_blocks) if pair.a_blocks > 1 else pair.a_RD
    b_OR = _whole_vectors(pair.b_OR, pair.b_blocks)
    return replace(pair, a_RD=_aligned(a_RD), b_OR=_aligned(b_OR))


def _whole_vectors(packed: Tensor, blocks: int) -> Tensor:
    """Pad the rows of a packed matrix so that they begin and end at whole vectors of 8 of the dense matrix.

    The padding is zero. Rows of all blocks have one length (`loads.row_length`).
    """
    width = packed.shape[1]
    if not width % VECTOR:
        return packed
    length = width if blocks == 1 else width + VECTOR - 1
    length += -length % VECTOR
    ahead = [block * width % VECTOR for block in range(blocks)]
    parts = zip(packed.detach().chunk(blocks), ahead, strict=True)
    return torch.cat([pad(own, (before, length - width - before)) for own, before in parts])


def table_entries(pairs: Sequence[LoraPair | None]) -> tuple[list[TableEntry], list[LoraPair]]:
    """Return a table entry per pair (None: the site is not changed), and the pairs in the kernels' layout whose
    addresses the entries hold."""
    kept = [None if pair is None else kernel_layout(pair) for pair in pairs]
    return [_entry(pair) for pair in kept], [pair for pair in kept if pair is not None]


def slot_columns(pairs: Sequence[LoraPair | None]) -> tuple[SlotColumns, list[LoraPair]]:
    """Return the columns for `Slots.put`, and the pairs in the kernels' layout whose addresses they hold."""
    entries, kept = table_entries(pairs)
    return SlotColumns.of(entries), kept


def _aligned(weight: Tensor) -> Tensor:
    return weight if is_aligned(weight) else weight.detach().clone(memory_format=torch.contiguous_format)


def _entry(pair: LoraPair | None) -> TableEntry:
    """Return the table entry of a pair in the kernels' layout."""
    if pair is None:
        return NO_ENTRY
    assert pair.entry is not None, "expected a pair in the kernels' layout"
    return pair.entry


def _sizes(pair: LoraPair | None) -> tuple[int, int, int]:
    """Return the `SiteTable.sizes` of a pair."""
    return (0, 0, 0) if pair is None else (pair.rank, pair.rank // pair.a_blocks, pair.rank // pair.b_blocks)
