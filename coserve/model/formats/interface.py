"""Interface of the formats in which quantised checkpoints store their weights, and what several of them share.

O: output features, I: input features of a weight (O, I).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Settings = Mapping[str, object]
"""A config's `quantization_config`."""
Parts = Mapping[str, Tensor]
"""The stored tensors of one weight, by the suffixes of their names."""


@dataclass(frozen=True)
class Format:
    """How a quantised weight is stored: as several tensors, whose names differ in their last part only."""

    name: str
    """The name that users know, such as `fp8`."""
    main: str
    """Suffix of the tensor with the quantised numbers, such as `.qweight`."""
    others: tuple[str, ...]
    """Suffixes of the tensors that the weight may have besides: scales, zero points, permutations."""
    dequantize: Callable[[Parts], Tensor]
    """Returns the dense weight. Raises `KeyError` for a tensor that is missing."""
    dense: str = ".weight"
    """Suffix of the parameter in the model."""
    unused: tuple[str, ...] = ()
    """Suffixes of tensors that a dense weight does not need: scales of activations and of the KV cache."""


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return the numbers packed in int32 words, lowest bits first: (..., W) -> (..., W * 32 / bits)."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def spread(grid: Tensor, shape: Sequence[int], block: tuple[int, int]) -> Tensor:
    """Repeat each number of a grid (..., O / block[0], I / block[1]) over its block of a matrix of `shape`."""
    rows = grid.repeat_interleave(block[0], -2)[..., : shape[-2], :]
    return rows.repeat_interleave(block[1], -1)[..., : shape[-1]]


def scaled(numbers: Tensor, scale: Tensor, block: tuple[int, int] | None = None, zero: Tensor | None = None) -> Tensor:
    """Return `(numbers - zero) * scale` in float32.

    `scale` and `zero`: one number, or a grid over the last two dimensions, of blocks of that size (None: the size that
    the grid's shape implies).
    """
    numbers = numbers.float()
    if zero is not None:
        numbers = numbers - _over(zero.float(), numbers, block)
    return numbers * _over(scale.float(), numbers, block)


def _over(grid: Tensor, numbers: Tensor, block: tuple[int, int] | None) -> Tensor:
    if grid.numel() == 1:
        return grid.reshape(())
    if grid.dim() == 1:
        grid = grid[:, None]  # one number a row
    rows, columns = numbers.shape[-2:]
    if block is None:
        block = rows // grid.shape[-2], columns // grid.shape[-1]
    spanned = spread(grid, numbers.shape, block)
    if spanned.shape[-2:] != numbers.shape[-2:]:
        raise ValueError(f"expected scales for blocks of {block} of {tuple(numbers.shape)}, got {tuple(grid.shape)}")
    return spanned
