"""What every LoRA backend is given: an adapter's matrices at one site, sites that read one input, their frozen
weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

VECTOR = 8
"""Elements of a row of b_OR that are read together."""
ALIGNMENT = 16
"""Bytes; weights start at a multiple of it, so that they are read 16 bytes at a time."""


@dataclass(frozen=True)
class MainGrads:
    """Sums of a pair's gradients over micro-batches: fp32, contiguous, shaped as the pair's matrices."""

    a_RD: Tensor  # noqa: N815
    b_OR: Tensor  # noqa: N815


class TableEntry(NamedTuple):
    """A pair as the kernels' table lists it: addresses of its matrices and of their `MainGrads` (0: none), shape,
    scaling."""

    a: int
    b: int
    sum_a: int
    sum_b: int
    shape: int
    """`entry_shape`: a dense pair's is its rank."""
    scaling: float

    @property
    def rank(self) -> int:
        return self.shape & MAX_RANK


MAX_RANK, MAX_BLOCKS = (1 << 16) - 1, 128
"""What an entry's shape holds."""


def entry_shape(rank: int, a_blocks: int, b_blocks: int) -> int:
    """The rank, in bits 16 to 23 the blocks of A beyond the first, and from bit 24 on those of B."""
    assert rank <= MAX_RANK and max(a_blocks, b_blocks) <= MAX_BLOCKS, "expected a rank and blocks that an entry holds"
    return rank | a_blocks - 1 << 16 | b_blocks - 1 << 24


@dataclass(frozen=True)
class LoraPair:
    """One adapter at one site, in the compute dtype: `x_TD -> scaling * (x_TD a_RDᵀ) b_ORᵀ`, any rank R >= 1.

    The contents of its tensors may change, their addresses must not.

    BD-LoRA: one of both matrices may be block-diagonal, of N blocks that divide D, O and R, and is then kept packed,
    its blocks one below the other (PEFT's layout). Block i of A, rows [i R/N, (i+1) R/N) of (R, D/N), reads the columns
    [i D/N, (i+1) D/N) of x; block i of B, rows [i O/N, (i+1) O/N) of (O, R/N), reads the ranks [i R/N, (i+1) R/N).
    """

    a_RD: Tensor  # noqa: N815
    b_OR: Tensor  # noqa: N815
    scaling: float
    main_grads: MainGrads | None = None
    """Where given, `segmented` adds the pair's gradients here and autograd returns none. Other backends ignore it."""
    a_blocks: int = 1
    """Blocks of a packed block-diagonal a_RD: (R, D / a_blocks)."""
    b_blocks: int = 1
    """Blocks of a packed block-diagonal b_OR: (O, R / b_blocks)."""

    def __post_init__(self) -> None:
        blocks = self.blocks
        if blocks > 1:
            assert min(self.a_blocks, self.b_blocks) == 1, "expected one block-diagonal matrix, not both"
            rows = {self.rank, self.b_OR.shape[0]} if self.b_blocks > 1 else {self.rank}
            assert all(count % blocks == 0 for count in rows), f"expected whole blocks, got {rows} rows in {blocks}"

    @property
    def rank(self) -> int:
        """R, over all blocks."""
        return self.a_RD.shape[0]

    @property
    def blocks(self) -> int:
        """Blocks of the block-diagonal matrix; 1: both are dense."""
        return max(self.a_blocks, self.b_blocks)

    def dense(self) -> LoraPair:
        """The same pair with its zeros; differentiable, without `main_grads`."""
        if self.blocks == 1:
            return self
        a_RD, b_OR = block_diagonal(self.a_RD, self.a_blocks), block_diagonal(self.b_OR, self.b_blocks)
        return LoraPair(a_RD, b_OR, self.scaling)

    @cached_property
    def entry(self) -> TableEntry | None:
        """None where the kernels cannot read the pair as it lies: contiguous and aligned, rows of b_OR and of blocks of
        A whole vectors."""
        if self.a_blocks > 1 and self.a_RD.shape[1] % VECTOR:
            return None
        if self.b_OR.shape[1] % VECTOR or not (is_aligned(self.a_RD) and is_aligned(self.b_OR)):
            return None
        sums = (0, 0)
        if self.main_grads is not None:
            both = self.main_grads.a_RD, self.main_grads.b_OR
            assert all(own.dtype == torch.float32 and own.is_contiguous() for own in both), (
                "expected contiguous fp32 sums"
            )
            assert all(own.data_ptr() % ALIGNMENT == 0 for own in both), "expected sums at whole vectors"
            sums = both[0].data_ptr(), both[1].data_ptr()
        shape = entry_shape(self.rank, self.a_blocks, self.b_blocks)
        return TableEntry(self.a_RD.data_ptr(), self.b_OR.data_ptr(), *sums, shape, self.scaling)


def block_diagonal(packed: Tensor, blocks: int) -> Tensor:
    """The matrix whose `blocks` blocks lie one below the other in `packed`."""
    if blocks == 1:
        return packed
    whole: Tensor = torch.block_diag(*packed.chunk(blocks))  # type: ignore[no-untyped-call]
    return whole


def is_aligned(weight: Tensor) -> bool:
    """Contiguous and aligned."""
    return weight.is_contiguous() and weight.data_ptr() % ALIGNMENT == 0


@dataclass(frozen=True, eq=False)
class SiteGroup:
    """Sites of one layer that read one input (q, k and v), in the order in which they run. Compared by identity."""

    names: tuple[str, ...]
    index: int = 0
    """Among the layer's groups."""


@dataclass(frozen=True)
class StackedWeights:
    """The frozen weights of the sites of a group, one below the other. Only here, and in the choice of dense GEMMs, is
    it known how they are stored."""

    weight: Tensor
    """(ΣO, D)."""
    bias: Tensor | None
    sizes: tuple[int, ...]
    """Each site's O."""

    @property
    def in_features(self) -> int:
        """D."""
        return self.weight.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that hold the weights, for copies of a layer that share them."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def linear(self, x_TD: Tensor) -> Tensor:
        """`x Wᵀ + bias`: (T, ΣO)."""
        return functional.linear(x_TD, self.weight, self.bias)

    def traced_linear(self, x: Tensor, group: int) -> Tensor:
        """`linear` as an op that torch.compile keeps whole; `group`: `SiteGroup.index` of the sites."""
        return cast(Tensor, torch.ops.coserve.linear(x, self.weight, self.bias, self.sizes, group))

    def backward(self, dy_TO: Tensor) -> Tensor:
        """`dy W`, the gradient of x: (T, D)."""
        return dy_TO @ self.weight

    def add_backward(self, dx_TD: Tensor, dy_TO: Tensor) -> Tensor:
        """Add `dy W` to `dx_TD` in place; returns it."""
        return dx_TD.addmm_(dy_TO, self.weight)

    def add_backward_of_sites(self, dx_TD: Tensor, dys_TO: Sequence[Tensor]) -> None:
        """`add_backward` where each site's gradient is a tensor of its own."""
        for dy_TO, weight_OD in zip(dys_TO, torch.split(self.weight, list(self.sizes)), strict=True):
            dx_TD.addmm_(dy_TO, weight_OD)
