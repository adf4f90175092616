"""Which part of a matrix each rank holds, as ranges of its features: plain data, computed by every rank alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, Self

import torch
from torch import Tensor

Range = tuple[int, int]
"""`[start, stop)` of the features of the whole matrix."""


class Lazy(Protocol):
    """A tensor, or one in a file of which a slice reads only that slice."""

    def __getitem__(self, index: slice | tuple[slice, ...], /) -> Tensor: ...


@dataclass(frozen=True)
class Features:
    """One dimension of a matrix, partitioned among the ranks."""

    size: int
    """Of the whole matrix."""
    ranks: tuple[tuple[Range, ...], ...]
    """Each rank's ranges, which lie side by side in its shard. Of one length in all on every rank."""

    @classmethod
    def whole(cls, size: int, ranks: int) -> Self:
        """Every rank holds all of them."""
        return cls(size, (((0, size),),) * ranks)

    @classmethod
    def even(cls, size: int, ranks: int) -> Self:
        """Each rank holds as many as any other, in order; `size` is a multiple of `ranks`."""
        assert size % ranks == 0, f"expected a multiple of {ranks}, got {size}"
        part = size // ranks
        return cls(size, tuple(((rank * part, (rank + 1) * part),) for rank in range(ranks)))

    @classmethod
    def heads(cls, heads: int, head_size: int, ranks: int) -> Self:
        """Whole heads: as many for each rank, or where there are fewer than ranks, one head for `ranks / heads`
        neighbours."""
        if heads % ranks == 0:
            return cls.even(heads * head_size, ranks)
        assert ranks % heads == 0, f"expected {heads} heads to divide {ranks} ranks, or the other way round"
        first = [rank * heads // ranks * head_size for rank in range(ranks)]
        return cls(heads * head_size, tuple(((start, start + head_size),) for start in first))

    @classmethod
    def joined(cls, parts: Sequence[Features]) -> Self:
        """Several matrices in one, each partitioned by itself: fused query, key and value projections."""
        starts = [sum(part.size for part in parts[:i]) for i in range(len(parts))]
        ranks = tuple(
            tuple(
                (start + a, start + b) for start, part in zip(starts, parts, strict=True) for a, b in part.ranks[rank]
            )
            for rank in range(len(parts[0].ranks))
        )
        return cls(sum(part.size for part in parts), ranks)

    def shard(self, whole: Lazy, rank: int) -> Tensor:
        """The rank's part of a vector."""
        parts = [whole[a:b] for a, b in self.ranks[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @property
    def local(self) -> int:
        """How many a rank holds."""
        return sum(stop - start for start, stop in self.ranks[0])

    @property
    def holders(self) -> int:
        """Ranks that hold the same ones."""
        return self.ranks.count(self.ranks[0])


@dataclass(frozen=True)
class MatrixPartition:
    """A matrix partitioned in both of its dimensions."""

    rows: Features
    columns: Features

    @property
    def holders(self) -> int:
        """Ranks that hold the same shard. Shards of other ranks do not overlap it."""
        pairs = list(zip(self.rows.ranks, self.columns.ranks, strict=True))
        return pairs.count(pairs[0])

    @property
    def shape(self) -> tuple[int, int]:
        """Of a shard."""
        return self.rows.local, self.columns.local

    def shard(self, whole: Lazy, rank: int) -> Tensor:
        """The rank's shard of the whole matrix: a view of a tensor where it lies in one piece."""
        parts = [
            [whole[a:b, c:d] for c, d in self.columns.ranks[rank]]  # reads these elements only
            for a, b in self.rows.ranks[rank]
        ]
        rows = [own[0] if len(own) == 1 else torch.cat(own, 1) for own in parts]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def put(self, shard: Tensor, whole: Tensor, rank: int) -> None:
        """Copies the rank's shard to its place in the whole matrix."""
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
    """By output features: reads the whole input, gives the rank's part of the output."""
    ROW = "row"
    """By input features: reads the rank's part, gives a term of the whole output. The ranks' terms are summed."""


@dataclass(frozen=True)
class SitePartition:
    """How one linear module of the base is partitioned."""

    parallel: Parallel
    inputs: Features
    outputs: Features

    @property
    def sums(self) -> bool:
        """The module gives a term of its output, which is the sum of the ranks' terms."""
        return self.parallel is Parallel.ROW

    @property
    def fused(self) -> bool:
        """Several matrices in one."""
        return max(len(self.inputs.ranks[0]), len(self.outputs.ranks[0])) > 1
