"""The ranges of a matrix's features that each tensor-parallel rank holds: plain data, computed alike by every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Protocol, Self

import torch
from torch import Tensor

Range = tuple[int, int]
"""`[start, stop)` of the features of the whole matrix."""


class Lazy(Protocol):
    """A tensor, or a tensor in a file, where reading a slice reads only that slice."""

    def __getitem__(self, index: slice | tuple[slice, ...], /) -> Tensor: ...


@dataclass(frozen=True)
class Features:
    """One dimension of a matrix, partitioned among the ranks."""

    size: int
    """Size in the whole matrix."""
    ranks: tuple[tuple[Range, ...], ...]
    """Each rank's ranges, which are concatenated in its shard. Their total length is equal on every rank."""

    @classmethod
    def whole(cls, size: int, ranks: int) -> Self:
        """Let every rank hold all features."""
        return cls(size, (((0, size),),) * ranks)

    @classmethod
    def even(cls, size: int, ranks: int) -> Self:
        """Give each rank an equal contiguous range, in order; `size` is a multiple of `ranks`."""
        assert size % ranks == 0, f"expected a multiple of {ranks}, got {size}"
        part = size // ranks
        return cls(size, tuple(((rank * part, (rank + 1) * part),) for rank in range(ranks)))

    @classmethod
    def heads(cls, heads: int, head_size: int, ranks: int) -> Self:
        """Give each rank whole heads: equally many, or if there are fewer heads than ranks, one head for each `ranks /
        heads` neighbouring ranks."""
        if heads % ranks == 0:
            return cls.even(heads * head_size, ranks)
        assert ranks % heads == 0, f"expected {heads} heads to divide {ranks} ranks, or the other way round"
        first = [rank * heads // ranks * head_size for rank in range(ranks)]
        return cls(heads * head_size, tuple(((start, start + head_size),) for start in first))

    @classmethod
    def joined(cls, parts: Sequence[Features]) -> Self:
        """Concatenate several matrices, each partitioned by itself, such as fused query, key and value projections."""
        starts = [sum(part.size for part in parts[:i]) for i in range(len(parts))]
        ranks = tuple(
            tuple(
                (start + a, start + b) for start, part in zip(starts, parts, strict=True) for a, b in part.ranks[rank]
            )
            for rank in range(len(parts[0].ranks))
        )
        return cls(sum(part.size for part in parts), ranks)

    def shard(self, whole: Lazy, rank: int, dimension: int = 0) -> Tensor:
        """Return the rank's shard of a vector, or of a tensor along a dimension."""
        parts = [whole[(*[slice(None)] * dimension, slice(a, b))] for a, b in self.ranks[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dimension)

    @property
    def holders(self) -> int:
        """Number of ranks that hold the same features."""
        return self.ranks.count(self.ranks[0])

    @property
    def local(self) -> int:
        """Number of features that a rank holds."""
        return sum(stop - start for start, stop in self.ranks[0])


@dataclass(frozen=True)
class MatrixPartition:
    """A matrix partitioned in both of its dimensions."""

    rows: Features
    columns: Features

    @cached_property
    def holders(self) -> int:
        """Number of ranks that hold the same shard. Different shards do not overlap, unless `overlaps`."""
        pairs = list(zip(self.rows.ranks, self.columns.ranks, strict=True))
        return pairs.count(pairs[0])

    @cached_property
    def overlaps(self) -> bool:
        """Whether some elements, but not whole shards, are on several ranks, such as those of Mamba-2's only group."""
        held = self.local * len(self.rows.ranks) // self.holders
        return held > self.rows.size * self.columns.size

    def first(self, shard: Tensor, rank: int) -> Tensor:
        """Return the rank's shard with zeros for elements that a lower rank has, too."""
        counts = shard.new_zeros(self.rows.size, self.columns.size)
        for before in range(rank):
            self.put(torch.ones_like(shard), counts, before)
        return shard.masked_fill(self.shard(counts, rank) > 0, 0.0)

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Shape of a shard."""
        return self.rows.local, self.columns.local

    @property
    def local(self) -> int:
        """Number of elements of a shard."""
        return self.shape[0] * self.shape[1]

    @cached_property
    def is_whole(self) -> bool:
        """Whether every rank holds all elements, in their order."""
        every, all_rows, all_columns = range(len(self.rows.ranks)), ((0, self.rows.size),), ((0, self.columns.size),)
        return all(self.rows.ranks[rank] == all_rows and self.columns.ranks[rank] == all_columns for rank in every)

    def shard(self, whole: Lazy, rank: int) -> Tensor:
        """Return the rank's shard of the whole matrix: a view of the tensor if the shard is one rectangle."""
        parts = [
            [whole[a:b, c:d] for c, d in self.columns.ranks[rank]]  # reads only these elements
            for a, b in self.rows.ranks[rank]
        ]
        rows = [own[0] if len(own) == 1 else torch.cat(own, 1) for own in parts]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def put(self, shard: Tensor, whole: Tensor, rank: int) -> None:
        """Copy the rank's shard to its place in the whole matrix."""
        row = 0
        for a, b in self.rows.ranks[rank]:
            column = 0
            for c, d in self.columns.ranks[rank]:
                whole[a:b, c:d] = shard[row : row + b - a, column : column + d - c]
                column += d - c
            row += b - a


class Parallel(StrEnum):
    """How a linear module is partitioned (Megatron-LM, Shoeybi et al. '19, section 3)."""

    COLUMN = "column"
    """Partitioned by output features: reads the whole input, computes the rank's columns of the output."""
    ROW = "row"
    """Partitioned by input features: reads the rank's columns of the input. The ranks' outputs are summed."""


@dataclass(frozen=True)
class SitePartition:
    """Partition of one linear module of the base."""

    parallel: Parallel
    inputs: Features
    outputs: Features

    @property
    def sums(self) -> bool:
        """Whether the module's output is a sum over the ranks."""
        return self.parallel is Parallel.ROW
