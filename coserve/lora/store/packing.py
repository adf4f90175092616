"""An adapter's matrices back to back in memory, so that few copies move all of them.

Each matrix, and each of DoRA's vectors (fp32), begins at a cache line of the GPU. For the kernels b_OR's rows are
padded to whole vectors of 8; on a CPU they are not, as its products would differ in the last bits. An adapter has
hundreds of matrices, and a step must not wait for work on each of them: views are made on demand, and the kernels'
table of addresses is the layout's offsets plus one base address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coserve.kernels.lora.segmented.adapter_table import NO_ENTRY, SlotColumns
from coserve.kernels.lora.types import VECTOR, LoraPair, TableEntry
from coserve.memory.buffer import aligned
from coserve.model.lora import LoraWeights

_EMPTY = torch.empty(0)
VECTORS = ("scale_O", "magnitude_O")
"""Fields of a pair that hold DoRA's vectors."""


@dataclass(frozen=True)
class SitePlace:
    """Location of one pair in the layout's bytes, `first` to `end`."""

    first: int
    end: int
    a_at: int
    """Byte offset of a_RD in the layout."""
    b_at: int
    columns: int
    """Columns of b_OR, padding included."""
    a_shape: tuple[int, int]
    b_shape: tuple[int, int]
    like: LoraPair
    """The pair's other attributes; its matrices and vectors are empty."""
    vectors_at: dict[str, int]
    """Byte offset of each fp32 vector (O) of the pair, by its field."""

    @property
    def rank(self) -> int:
        """As `LoraPair.rank`."""
        return self.a_shape[0] // self.like.experts


class PackedLayout:
    """Locations of an adapter's matrices, site by site, a_RD before b_OR."""

    def __init__(self, pairs: Mapping[str, LoraPair], vector: int = 1) -> None:
        """b_OR's rows are padded to a multiple of `vector`."""
        self.vector = vector
        self.for_kernels = vector == VECTOR and all(pair.blocks == 1 for pair in pairs.values())
        """Whether the table of compiled generation steps can point at all pairs in place; it holds dense pairs only."""
        self.places: dict[str, SitePlace] = {}
        dtypes = {matrix.dtype for pair in pairs.values() for matrix in (pair.a_RD, pair.b_OR)}
        assert len(dtypes) <= 1, f"expected matrices of one dtype, got {sorted(map(str, dtypes))}"
        self.dtype = dtypes.pop() if dtypes else torch.float32
        at = 0
        for name, pair in pairs.items():
            columns = -(-pair.b_OR.shape[1] // vector) * vector
            b_at = at + aligned(pair.a_RD.nbytes)
            behind = b_at + aligned(pair.b_OR.shape[0] * columns * self.dtype.itemsize)
            vectors = [field for field in VECTORS if getattr(pair, field) is not None]
            v_bytes = aligned(4 * pair.b_OR.shape[0])
            end = behind + len(vectors) * v_bytes
            shapes = (pair.a_RD.shape[0], pair.a_RD.shape[1]), (pair.b_OR.shape[0], pair.b_OR.shape[1])
            scale, magnitude = (_EMPTY if field in vectors else None for field in VECTORS)
            like = replace(pair, a_RD=_EMPTY, b_OR=_EMPTY, main_grads=None, scale_O=scale, magnitude_O=magnitude)
            vectors_at = {field: behind + i * v_bytes for i, field in enumerate(vectors)}
            self.places[name] = SitePlace(at, end, at, b_at, columns, *shapes, like, vectors_at)
            at = end
        self.bytes = at
        self._columns: tuple[list[str], SlotColumns] | None = None

    def columns(self, names: Sequence[str]) -> SlotColumns:
        """Return the adapter's columns at these sites, in order, with offsets for addresses: see `SlotColumns.at`.

        The last result is cached: an engine always asks for the sites of its base. Ranks and scalings, which `at` does
        not change, are pinned, so that they are copied to the GPU asynchronously.
        """
        if self._columns is None or self._columns[0] != names:
            found = SlotColumns.of([self._offsets(name) for name in names])
            if torch.cuda.is_available():
                found = replace(found, ranks=found.ranks.pin_memory(), scalings=found.scalings.pin_memory())
            self._columns = [*names], found
        return self._columns[1]

    def _offsets(self, name: str) -> TableEntry:
        if (place := self.places.get(name)) is None:
            return NO_ENTRY
        scale = 1 + place.vectors_at["scale_O"] if "scale_O" in place.vectors_at else 0
        return TableEntry(place.a_at, place.b_at, 0, 0, place.b_shape[1], place.like.scaling, scale)

    def pair(self, name: str, memory: Tensor, first: int = 0) -> LoraPair:
        """The site's pair, as views of memory (uint8) that has the layout's bytes from `first` on."""
        place, size = self.places[name], self.dtype.itemsize
        (rows, width), (out, rank) = place.a_shape, place.b_shape
        typed = memory[place.first - first : place.end - first].view(self.dtype)
        start = typed.storage_offset()
        a_RD = typed.as_strided((rows, width), (width, 1), start)
        b_OR = typed.as_strided((out, rank), (place.columns, 1), start + (place.b_at - place.first) // size)
        if not place.vectors_at:
            return replace(place.like, a_RD=a_RD, b_OR=b_OR)
        vectors = {
            field: memory[at - first : at - first + 4 * out].view(torch.float32)
            for field, at in place.vectors_at.items()
        }
        scale, magnitude = (vectors.get(field) for field in VECTORS)
        return replace(place.like, a_RD=a_RD, b_OR=b_OR, scale_O=scale, magnitude_O=magnitude)

    @torch.no_grad()
    def copy(self, name: str, pair: LoraPair, memory: Tensor, first: int = 0) -> None:
        """Copy the site's pair into its place in memory that has the layout's bytes from `first` on."""
        own, columns = self.pair(name, memory, first), self.places[name].columns
        own.a_RD.copy_(pair.a_RD)
        if columns > own.b_OR.shape[1]:
            own.b_OR.as_strided((own.b_OR.shape[0], columns), (columns, 1)).zero_()
        own.b_OR.copy_(pair.b_OR)
        for field in self.places[name].vectors_at:
            getattr(own, field).copy_(getattr(pair, field))


class LaidOutSites(Mapping[str, LoraPair]):
    """A mapping from sites to an adapter's pairs, which lie in memory as `layout` says."""

    layout: PackedLayout

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.places)

    def __len__(self) -> int:
        return len(self.layout.places)


class PackedSites(LaidOutSites):
    """The pairs of an adapter as views of one run of memory."""

    def __init__(self, memory_N: Tensor, layout: PackedLayout) -> None:
        """`memory_N`: uint8, all of the layout's bytes."""
        self.memory_N, self.layout = memory_N, layout
        self._pairs: dict[str, LoraPair] = {}

    def __getitem__(self, name: str) -> LoraPair:
        pair = self._pairs.get(name)
        if pair is None:
            pair = self._pairs[name] = self.layout.pair(name, self.memory_N)
        return pair

    def columns(self, names: Sequence[str]) -> SlotColumns:
        """Return the adapter's columns at these sites, in order, without making a view for each pair."""
        return self.layout.columns(names).at(self.memory_N.data_ptr())

    def fill(self, source: Mapping[str, LoraPair]) -> None:
        """Copy all pairs from `source`."""
        for name in self.layout.places:
            self.layout.copy(name, source[name], self.memory_N)


class PartedSites(LaidOutSites):
    """The pairs of an adapter whose bytes lie in several parts of memory, cut anywhere. A pair is read as a copy."""

    def __init__(
        self, parts: Sequence[Tensor], layout: PackedLayout, copied: Callable[[], None] = lambda: None
    ) -> None:
        """`parts`: uint8, together the layout's bytes. `copied`: called when a copy from them to a GPU has been put on
        the current stream."""
        self.parts, self.layout, self.copied = tuple(parts), layout, copied

    def __getitem__(self, name: str) -> LoraPair:
        place, at, found = self.layout.places[name], 0, list[Tensor]()
        for part in self.parts:
            found.append(part[max(0, place.first - at) : max(0, place.end - at)])
            at += len(part)
        return self.layout.pair(name, torch.cat(found), place.first)


def packed_bytes(weights: LoraWeights) -> int:
    """Bytes of the adapter's layout."""
    return layout_of(weights).bytes


def layout_of(weights: LoraWeights) -> PackedLayout:
    """Return the adapter's layout, or the one that it would get."""
    sites = weights.sites
    return sites.layout if isinstance(sites, LaidOutSites) else PackedLayout(sites)


def bytes_without_experts(weights: LoraWeights) -> int:
    """Bytes of the adapter's layout without its experts' pairs."""
    return sum(place.end - place.first for place in layout_of(weights).places.values() if place.like.experts <= 1)


def without_experts(weights: LoraWeights, slot: int) -> LoraWeights:
    """Return the adapter without its experts' pairs, which LoRA servers hold in `slot`; they are not read."""
    names = [name for name, place in layout_of(weights).places.items() if place.like.experts <= 1]
    return LoraWeights(weights.settings, {name: weights.sites[name] for name in names}, slot)


def packed(weights: LoraWeights, *, for_kernels: bool) -> LoraWeights:
    """Copy an adapter to host memory in a packed layout: that of the kernels, or of a CPU.

    For the kernels block-diagonal pairs become dense here, as the table of compiled generation steps holds dense ones
    only. So they live in the page pool, and take no GPU memory that the plan has not counted. An adapter on the host
    that already has this layout is returned as it is.
    """
    sites = weights.sites
    if isinstance(sites, LaidOutSites) and (sites.layout.for_kernels if for_kernels else sites.layout.vector == 1):
        return weights
    whole = {name: pair.dense() for name, pair in sites.items()} if for_kernels else sites
    layout = PackedLayout(whole, VECTOR if for_kernels else 1)
    copy = PackedSites(torch.empty(layout.bytes, dtype=torch.uint8), layout)
    copy.fill(whole)
    return LoraWeights(weights.settings, copy)


def copied_into(bytes_N: Tensor, weights: LoraWeights) -> LoraWeights:
    """Copy an adapter into `bytes_N` (uint8, at least its layout's bytes) and return its views there.

    The copy is asynchronous if the source lies in pinned memory.
    """
    sites, layout = weights.sites, layout_of(weights)
    copy = PackedSites(bytes_N[: layout.bytes], layout)
    if isinstance(sites, PackedSites):
        copy.memory_N.copy_(sites.memory_N, non_blocking=True)
    elif isinstance(sites, PartedSites):
        at = 0
        for part in sites.parts:
            copy.memory_N[at : at + len(part)].copy_(part, non_blocking=True)
            at += len(part)
        if bytes_N.is_cuda:
            sites.copied()
    else:
        copy.fill(sites)
    return LoraWeights(weights.settings, copy, weights.remote)
