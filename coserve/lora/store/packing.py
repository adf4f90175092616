"""An adapter's matrices back to back in few large blocks of memory, so that few copies move all of them.

Each matrix, and each of DoRA's vectors (fp32), begins at a cache line of the GPU. For the kernels b_OR's rows are
padded to whole vectors of 8; on a CPU they are not, as its products would differ in the last bits. An adapter has
hundreds of matrices, and a step must not wait for work on each of them: views are made on demand, and the kernels'
table of addresses is the layout's offsets plus one base address.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from coserve.kernels.lora.segmented.adapter_table import NO_ENTRY
from coserve.kernels.lora.types import VECTOR, LoraPair, TableEntry
from coserve.memory.buffer import aligned
from coserve.model.lora import LoraWeights

_EMPTY = torch.empty(0)
VECTORS = ("scale_O", "magnitude_O")
"""Fields of a pair that hold DoRA's vectors."""
BLOCK = 8 << 20
"""Bytes of a block of host memory. torch rounds pinned memory up to a power of two, and CUDA calls of other threads
wait while it is allocated."""
REST = 0.001
"""Seconds between two allocations of pinned memory, so that CUDA calls of other threads proceed."""


@dataclass(frozen=True)
class SitePlace:
    """Location of one pair in a piece of memory. Offsets in elements."""

    piece: int
    a_at: int
    """Offset of a_RD in the piece."""
    b_at: int
    columns: int
    """Columns of b_OR, padding included."""
    a_shape: tuple[int, int]
    b_shape: tuple[int, int]
    like: LoraPair
    """The pair's other attributes; its matrices and vectors are empty."""
    vectors_at: dict[str, int]
    """Byte offset of each fp32 vector (O) of the pair, by its field."""


class PackedLayout:
    """Locations of an adapter's matrices, site by site, a_RD before b_OR."""

    def __init__(self, weights: LoraWeights, block: int = BLOCK, vector: int = 1) -> None:
        """`block`: most bytes of a piece, unless a single pair is larger. b_OR's rows are padded to a multiple of
        `vector`."""
        self.for_kernels = vector == VECTOR and all(pair.blocks == 1 for pair in weights.sites.values())
        """Whether the table of compiled generation steps can point at all pairs in place; it holds dense pairs only."""
        self.places: dict[str, SitePlace] = {}
        self.bounds = [0]
        """Byte offsets: piece i is `bounds[i]` to `bounds[i + 1]`. A pair lies in one piece."""
        dtypes = {matrix.dtype for pair in weights.sites.values() for matrix in (pair.a_RD, pair.b_OR)}
        assert len(dtypes) <= 1, f"expected matrices of one dtype, got {sorted(map(str, dtypes))}"
        self.dtype = dtypes.pop() if dtypes else torch.float32
        first = at = 0
        for name, pair in weights.sites.items():
            columns = -(-pair.b_OR.shape[1] // vector) * vector
            a_bytes = aligned(pair.a_RD.nbytes)
            b_bytes = aligned(pair.b_OR.shape[0] * columns * self.dtype.itemsize)
            vectors = [field for field in VECTORS if getattr(pair, field) is not None]
            v_bytes = aligned(4 * pair.b_OR.shape[0])
            size = a_bytes + b_bytes + len(vectors) * v_bytes
            if at > first and at + size - first > block:
                self.bounds.append(at)
                first = at
            a_at, b_at = ((at + before - first) // self.dtype.itemsize for before in (0, a_bytes))
            shapes = (pair.a_RD.shape[0], pair.a_RD.shape[1]), (pair.b_OR.shape[0], pair.b_OR.shape[1])
            scale, magnitude = (_EMPTY if field in vectors else None for field in VECTORS)
            like = replace(pair, a_RD=_EMPTY, b_OR=_EMPTY, main_grads=None, scale_O=scale, magnitude_O=magnitude)
            behind = at - first + a_bytes + b_bytes
            vectors_at = {field: behind + i * v_bytes for i, field in enumerate(vectors)}
            self.places[name] = SitePlace(len(self.bounds) - 1, a_at, b_at, columns, *shapes, like, vectors_at)
            at += size
        self.bounds.append(at)

    @property
    def bytes(self) -> int:
        return self.bounds[-1]

    @property
    def pieces(self) -> list[int]:
        """Bytes of each piece."""
        return [end - first for first, end in pairwise(self.bounds)]

    def pair(self, name: str, piece: Tensor) -> LoraPair:
        """The site's pair, as views of its piece (uint8)."""
        place, memory = self.places[name], piece.view(self.dtype)
        start, (rows, width), (out, rank) = memory.storage_offset(), place.a_shape, place.b_shape
        a_RD = memory.as_strided((rows, width), (width, 1), start + place.a_at)
        b_OR = memory.as_strided((out, rank), (place.columns, 1), start + place.b_at)
        if not place.vectors_at:
            return replace(place.like, a_RD=a_RD, b_OR=b_OR)
        vectors = {field: piece[at : at + 4 * out].view(torch.float32) for field, at in place.vectors_at.items()}
        scale, magnitude = (vectors.get(field) for field in VECTORS)
        return replace(place.like, a_RD=a_RD, b_OR=b_OR, scale_O=scale, magnitude_O=magnitude)

    @torch.no_grad()
    def copy(self, name: str, pair: LoraPair, piece: Tensor) -> None:
        """Copy the site's pair into its piece."""
        own, columns = self.pair(name, piece), self.places[name].columns
        own.a_RD.copy_(pair.a_RD)
        if columns > own.b_OR.shape[1]:
            own.b_OR.as_strided((own.b_OR.shape[0], columns), (columns, 1)).zero_()
        own.b_OR.copy_(pair.b_OR)
        for field in self.places[name].vectors_at:
            getattr(own, field).copy_(getattr(pair, field))


class PackedSites(Mapping[str, LoraPair]):
    """A mapping from sites to an adapter's pairs, as views of pieces of memory."""

    def __init__(self, pieces: Sequence[Tensor], layout: PackedLayout) -> None:
        """`pieces`: uint8, one for each piece of the layout."""
        self.pieces, self.layout = tuple(pieces), layout
        self._pairs: dict[str, LoraPair] = {}

    def __getitem__(self, name: str) -> LoraPair:
        pair = self._pairs.get(name)
        if pair is None:
            pair = self._pairs[name] = self.layout.pair(name, self.pieces[self.layout.places[name].piece])
        return pair

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.places)

    def __len__(self) -> int:
        return len(self.layout.places)

    def entries(self, names: Sequence[str]) -> list[TableEntry]:
        """Return the kernels' table entries of these sites, in order. Makes no views."""
        addresses, size, found = (
            [piece.data_ptr() for piece in self.pieces],
            self.layout.dtype.itemsize,
            list[TableEntry](),
        )
        for name in names:
            place = self.layout.places.get(name)
            if place is None:
                found.append(NO_ENTRY)
            else:
                at = addresses[place.piece]
                a, b = at + place.a_at * size, at + place.b_at * size
                scale = at + place.vectors_at["scale_O"] if "scale_O" in place.vectors_at else 0
                found.append(TableEntry(a, b, 0, 0, place.b_shape[1], place.like.scaling, scale))
        return found

    def lies_as_packed(self, *, pinned: bool) -> bool:
        """Whether the pairs are on the host, laid out as `packed` does."""
        on_host = all(piece.device.type == "cpu" and piece.is_pinned() == pinned for piece in self.pieces)
        return self.layout.for_kernels and on_host

    def fill(self, source: Mapping[str, LoraPair]) -> None:
        """Copy all pairs from `source`."""
        for name, place in self.layout.places.items():
            self.layout.copy(name, source[name], self.pieces[place.piece])


def packed_bytes(weights: LoraWeights) -> int:
    """Bytes of the adapter's layout."""
    return layout_of(weights).bytes


def layout_of(weights: LoraWeights) -> PackedLayout:
    """Return the adapter's layout, or the one that it would get."""
    return weights.sites.layout if isinstance(weights.sites, PackedSites) else PackedLayout(weights)


def host_piece(size: int, *, pinned: bool) -> Tensor:
    """Allocate host memory (uint8). Allocations of pinned memory pause in between for CUDA calls of other threads."""
    piece = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    if pinned:
        time.sleep(REST)
    return piece


def packed(weights: LoraWeights, *, pinned: bool, block: int = BLOCK) -> LoraWeights:
    """Copy an adapter to host memory in the kernels' layout, in pieces of up to `block` bytes.

    `pinned`: use memory from which a GPU copies asynchronously. Block-diagonal pairs become dense here, as the table of
    compiled generation steps holds dense ones only. So they live in the page pool, and take no GPU memory that the plan
    has not counted. An adapter that already has this layout is returned as it is.
    """
    if isinstance(weights.sites, PackedSites) and weights.sites.lies_as_packed(pinned=pinned):
        return weights
    whole = {name: pair.dense() for name, pair in weights.sites.items()}
    layout = PackedLayout(LoraWeights(weights.settings, whole), block, VECTOR)
    copy = PackedSites([host_piece(size, pinned=pinned) for size in layout.pieces], layout)
    copy.fill(whole)
    return LoraWeights(weights.settings, copy)


def copied_into(bytes_N: Tensor, weights: LoraWeights) -> LoraWeights:
    """Copy an adapter into `bytes_N` (uint8, at least its layout's bytes) and return its views there.

    The copy is asynchronous if the source comes from `packed` and is pinned; torch keeps the source until it ends.
    """
    layout = layout_of(weights)
    copy = PackedSites([bytes_N[first:end] for first, end in pairwise(layout.bounds)], layout)
    if isinstance(weights.sites, PackedSites):
        for ours, theirs in zip(copy.pieces, weights.sites.pieces, strict=True):
            ours.copy_(theirs, non_blocking=True)
    else:
        copy.fill(weights.sites)
    return LoraWeights(weights.settings, copy)
