"""The `FrozenWeight`s of bases that stay quantised in memory, FP8 and NF4.

A backward dequantises the weight into temporary memory, which torch's allocator reuses for the next layer, or
multiplies in FP8 (`Fp8Weight.rounds_gradients`).

Letters: T tokens, D inputs, O outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from coserve.kernels.lora.types import FrozenWeight
from coserve.kernels.quantized import fp8, nf4


@dataclass(frozen=True)
class QuantizedWeight(FrozenWeight, ABC):
    """Stacked weights as codes and scales, both with a row for each output. `weight` holds the codes."""

    scales: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bias is None else self.bias.dtype

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*super().tensors, self.scales)

    @abstractmethod
    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantised weight (ΣO, D)."""

    def linear(self, x_TD: Tensor) -> Tensor:
        return functional.linear(x_TD, self.dense(x_TD.dtype), self.bias)

    def traced_linear(self, x: Tensor, group: int) -> Tensor:
        return cast(Tensor, torch.ops.coserve.linear_quantized(x, sum(self.sizes), group))

    def backward(self, dy_TO: Tensor) -> Tensor:
        return dy_TO @ self.dense(dy_TO.dtype)

    def add_backward(self, dx_TD: Tensor, dy_TO: Tensor) -> Tensor:
        return dx_TD.addmm_(dy_TO, self.dense(dy_TO.dtype))

    def add_backward_of_sites(self, dx_TD: Tensor, dys_TO: Sequence[Tensor]) -> None:
        parts = (torch.split(own, list(self.sizes)) for own in (self.weight, self.scales))
        for dy_TO, codes, scales in zip(dys_TO, *parts, strict=True):
            replace(self, weight=codes, scales=scales, bias=None, sizes=(len(codes),)).add_backward(dx_TD, dy_TO)


@dataclass(frozen=True)
class Fp8Weight(QuantizedWeight):
    """Codes e4m3 (ΣO, D), scales fp32 (ΣO): see `fp8`."""

    rounds_gradients: bool = True
    """Whether backwards round rows of dy to FP8 where forwards round x (`fp8.rounds`)."""

    @property
    def row_scales(self) -> Tensor:
        return self.scales

    def dense(self, dtype: torch.dtype) -> Tensor:
        return fp8.dequantize(self.weight, self.scales, dtype)

    def linear(self, x_TD: Tensor) -> Tensor:
        if not fp8.rounds(x_TD):
            return super().linear(x_TD)
        y_TO = fp8.product(x_TD, self.weight, self.scales)
        return y_TO if self.bias is None else y_TO.add_(self.bias)

    def backward(self, dy_TO: Tensor) -> Tensor:
        if self.rounds_gradients and fp8.rounds(dy_TO):
            return fp8.gradient(dy_TO, self.weight, self.scales)
        return super().backward(dy_TO)

    def add_backward(self, dx_TD: Tensor, dy_TO: Tensor) -> Tensor:
        if self.rounds_gradients and fp8.rounds(dy_TO):
            return dx_TD.add_(self.backward(dy_TO))
        return super().add_backward(dx_TD, dy_TO)


@dataclass(frozen=True)
class Nf4Weight(QuantizedWeight):
    """Codes uint8 (ΣO, D / 2), scales fp32 (ΣO, D / 64): see `nf4`."""

    @property
    def in_features(self) -> int:
        return 2 * self.weight.shape[1]

    def dense(self, dtype: torch.dtype) -> Tensor:
        return nf4.dequantize(self.weight, self.scales, dtype)
