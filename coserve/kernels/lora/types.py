"""Inputs of every LoRA backend: an adapter's pair at one site, groups of sites that read one input, frozen weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from coserve.core.limits import MAX_IMPORTED_BLOCKS, MAX_IMPORTED_RANK

VECTOR = 8
"""Elements of a row of b_OR that are read at once."""
ALIGNMENT = 16
"""Alignment of weights in bytes: kernels read 16 bytes at a time."""


@dataclass(frozen=True)
class MainGrads:
    """Sums of a pair's gradients over micro-batches: fp32, contiguous, shaped as the pair's matrices."""

    a_RD: Tensor  # noqa: N815
    b_OR: Tensor  # noqa: N815
    scale_O: Tensor | None = None  # noqa: N815


class TableEntry(NamedTuple):
    """A pair as an entry of the kernels' table: addresses of its matrices and of their `MainGrads` (0: none), shape,
    scaling, address of its DoRA scale (0: none)."""

    a: int
    b: int
    sum_a: int
    sum_b: int
    shape: int
    """Encoded by `entry_shape`; for a dense pair it is the rank."""
    scaling: float
    scale: int = 0

    @property
    def rank(self) -> int:
        return self.shape & MAX_IMPORTED_RANK


def entry_shape(rank: int, a_blocks: int, b_blocks: int) -> int:
    """Encode a shape: the LoRA rank in the low 16 bits, A's blocks minus 1 in bits 16 to 23, B's minus 1 from bit 24
    on."""
    fits = rank <= MAX_IMPORTED_RANK and max(a_blocks, b_blocks) <= MAX_IMPORTED_BLOCKS
    assert fits, f"expected a rank and blocks that an entry holds, got {rank}, {a_blocks} and {b_blocks}"
    return rank | a_blocks - 1 << 16 | b_blocks - 1 << 24


@dataclass(frozen=True)
class LoraPair:
    """One adapter at one site, in the compute dtype: `x_TD -> scaling * (x_TD a_RDᵀ) b_ORᵀ`, any rank R >= 1.

    The contents of its tensors may change, but not their addresses.

    BD-LoRA: one of the two matrices may be block-diagonal, of N blocks that divide D, O and R. It is then kept packed,
    its blocks stacked vertically (PEFT's layout). Block i of A, rows [i R/N, (i+1) R/N) of (R, D/N), reads the columns
    [i D/N, (i+1) D/N) of x; block i of B, rows [i O/N, (i+1) O/N) of (O, R/N), reads the ranks [i R/N, (i+1) R/N).
    """

    a_RD: Tensor  # noqa: N815
    b_OR: Tensor  # noqa: N815
    scaling: float
    main_grads: MainGrads | None = None
    """If given, `segmented` adds the pair's gradients here and autograd returns none. Other backends ignore it."""
    a_blocks: int = 1
    """Blocks of a packed block-diagonal a_RD: (R, D / a_blocks)."""
    b_blocks: int = 1
    """Blocks of a packed block-diagonal b_OR: (O, R / b_blocks)."""
    scale_O: Tensor | None = None  # noqa: N815
    """DoRA: the output's factor, fp32 (`kernels.lora.dora`). None: plain LoRA."""
    experts: int = 1
    """Experts whose pairs are stacked, one after another: a_RD is (experts R, D), b_OR (experts O, R)."""
    magnitude_O: Tensor | None = None  # noqa: N815
    """DoRA as it is trained and stored: the norms of the adapted weight's rows, fp32. Forwards read `scale_O` only."""

    def __post_init__(self) -> None:
        blocks = self.blocks
        if blocks > 1:
            assert min(self.a_blocks, self.b_blocks) == 1, "expected one block-diagonal matrix, not both"
            rows = {self.rank, self.b_OR.shape[0]} if self.b_blocks > 1 else {self.rank}
            assert all(count % blocks == 0 for count in rows), f"expected whole blocks, got {rows} rows in {blocks}"

    @property
    def rank(self) -> int:
        """The LoRA rank R, over all blocks. Of experts' pairs: the rank of one expert."""
        return self.a_RD.shape[0] // self.experts

    @property
    def blocks(self) -> int:
        """Number of blocks of the block-diagonal matrix; 1: both are dense."""
        return max(self.a_blocks, self.b_blocks)

    def to(
        self, device: torch.device | str | None, dtype: torch.dtype | None = None, *, copy: bool = False
    ) -> LoraPair:
        """Return the pair on a device, without `main_grads`; its matrices in `dtype`, DoRA's vectors in fp32."""

        def vector(own: Tensor | None) -> Tensor | None:
            return None if own is None else own.detach().to(device, copy=copy)

        return replace(
            self,
            a_RD=self.a_RD.detach().to(device, dtype, copy=copy),
            b_OR=self.b_OR.detach().to(device, dtype, copy=copy),
            main_grads=None,
            scale_O=vector(self.scale_O),
            magnitude_O=vector(self.magnitude_O),
        )

    def dense(self) -> LoraPair:
        """Return the pair with its packed matrix expanded; differentiable, without `main_grads`."""
        if self.blocks == 1:
            return self
        a_RD, b_OR = block_diagonal(self.a_RD, self.a_blocks), block_diagonal(self.b_OR, self.b_blocks)
        return LoraPair(a_RD, b_OR, self.scaling)

    @cached_property
    def entry(self) -> TableEntry | None:
        """Return the pair's table entry; None if kernels cannot read the pair in place.

        They can if its matrices are contiguous and aligned, and rows of b_OR and of blocks of A are whole vectors.
        """
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
        scale = 0 if self.scale_O is None else self.scale_O.data_ptr()
        return TableEntry(self.a_RD.data_ptr(), self.b_OR.data_ptr(), *sums, shape, self.scaling, scale)


def block_diagonal(packed: Tensor, blocks: int) -> Tensor:
    """Expand the `blocks` stacked in `packed` to a block-diagonal matrix."""
    if blocks == 1:
        return packed
    whole: Tensor = torch.block_diag(*packed.chunk(blocks))  # type: ignore[no-untyped-call]
    return whole


def is_aligned(weight: Tensor) -> bool:
    """Whether the weight is contiguous and aligned."""
    return weight.is_contiguous() and weight.data_ptr() % ALIGNMENT == 0


@dataclass(frozen=True, eq=False)
class SiteGroup:
    """Sites of one layer that read one input (q, k and v), in execution order. Compared by identity."""

    names: tuple[str, ...]
    index: int = 0
    """Index among the layer's groups."""


@dataclass(frozen=True)
class FrozenWeight:
    """The frozen base's weight at a group of sites, stacked vertically, unquantised. Subclasses quantise it
    (`kernels.quantized.weights`).

    Only these classes and the choice of dense GEMMs know how it is stored.
    """

    weight: Tensor
    """(ΣO, D): the sites' weights, stacked by rows."""
    bias: Tensor | None
    sizes: tuple[int, ...]
    """Output features O of each site."""

    @property
    def in_features(self) -> int:
        """D: input features."""
        return self.weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of products."""
        return self.weight.dtype

    @property
    def row_scales(self) -> Tensor | None:
        """Factors of the weight's rows for kernels that read `weight` in place: fp32 (ΣO); None: 1."""
        return None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that hold the weights, for copies of a layer that share them."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def linear(self, x_TD: Tensor) -> Tensor:
        """Return `x Wᵀ + bias`: (T, ΣO)."""
        return functional.linear(x_TD, self.weight, self.bias)

    def traced_linear(self, x: Tensor, group: int) -> Tensor:
        """Compute `linear` by an op that is opaque to torch.compile. `group`: `SiteGroup.index` of the sites."""
        return cast(Tensor, torch.ops.coserve.linear(x, self.weight, self.bias, self.sizes, group))

    def backward(self, dy_TO: Tensor) -> Tensor:
        """Return `dy W`, the gradient of x: (T, D)."""
        return dy_TO @ self.weight

    def add_backward(self, dx_TD: Tensor, dy_TO: Tensor) -> Tensor:
        """Add `dy W` to `dx_TD` in place; returns it."""
        return dx_TD.addmm_(dy_TO, self.weight)

    def add_backward_of_sites(self, dx_TD: Tensor, dys_TO: Sequence[Tensor]) -> None:
        """Call `add_backward` for each site's gradient, given as separate tensors."""
        for dy_TO, weight_OD in zip(dys_TO, torch.split(self.weight, list(self.sizes)), strict=True):
            dx_TD.addmm_(dy_TO, weight_OD)
