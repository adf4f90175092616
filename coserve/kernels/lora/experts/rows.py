"""The rows that a mixture of experts computes in one call, sorted by expert, and products with each expert's matrix.

T tokens, K experts chosen by each, S = T K rows, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, pad

WIDTH = 8
"""Rows of `grouped_mm`'s 16-bit operands must be a multiple of this many elements."""


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """The rows of one call, sorted by expert."""

    order_S: Tensor  # noqa: N815
    """Index of each row's (token, choice) pair in the flattened (T, K)."""
    expert_S: Tensor  # noqa: N815
    """Each row's expert; E: one that another GPU has, whose rows come last and are not computed."""
    token_S: Tensor  # noqa: N815
    ends_E: Tensor  # noqa: N815
    """Index one past each expert's last row: int32."""
    chosen: int
    """K."""

    @classmethod
    def by_expert(cls, chosen_TK: Tensor, experts: int) -> ExpertRows:
        """Sort the rows by expert alone. `chosen_TK`: the experts of each token."""
        return cls.of(chosen_TK, torch.argsort(chosen_TK.reshape(-1), stable=True), experts)

    @classmethod
    def of(cls, chosen_TK: Tensor, order_S: Tensor, experts: int) -> ExpertRows:
        """Return the rows in the order `order_S`, which sorts by expert first."""
        expert_S = chosen_TK.reshape(-1)[order_S]
        return cls(order_S, expert_S, order_S // chosen_TK.shape[1], ends_of(expert_S, experts), chosen_TK.shape[1])

    @property
    def experts(self) -> int:
        """E."""
        return len(self.ends_E)


def summed(y_SO: Tensor, order_S: Tensor, weights_TK: Tensor) -> Tensor:
    """Return each token's sum of its experts' outputs by these weights: (T, O)."""
    weighted_SO = y_SO * weights_TK.reshape(-1)[order_S].unsqueeze(-1)
    back_S = torch.empty_like(order_S)
    back_S[order_S] = torch.arange(order_S.shape[0], device=order_S.device)
    return weighted_SO[back_S].view(weights_TK.shape[0], weights_TK.shape[1], y_SO.shape[1]).sum(1)


def ends_of(group_S: Tensor, groups: int) -> Tensor:
    """Return the index one past each group's last row, for sorted rows: int32 (groups). Does not synchronise."""
    ids = torch.arange(groups, device=group_S.device, dtype=group_S.dtype)
    return torch.searchsorted(group_S, ids, right=True).to(torch.int32)


def grouped(x_SD: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
    """Return `x Wᵀ` (S, O) with the matrix of each row's expert; undefined for rows of no expert. Differentiable. In
    bfloat16 on a GPU it is one launch; elsewhere the host reads the ends and multiplies expert by expert."""
    if x_SD.is_cuda and x_SD.dtype is torch.bfloat16:
        return grouped_mm(*_wide(x_SD, weight_EOD), offs=ends_E)[:, : weight_EOD.shape[1]]
    found, start = [], 0
    for expert, end in enumerate(ends_E.tolist()):
        if end > start:
            found.append(x_SD[start:end] @ weight_EOD[expert].T)
        start = end
    found.append(x_SD.new_zeros(len(x_SD) - start, weight_EOD.shape[1]))
    return torch.cat(found)


def _wide(x_SD: Tensor, weight_EOD: Tensor) -> tuple[Tensor, Tensor]:
    """Return x and Wᵀ, with D and O padded where `grouped_mm` needs it: an odd LoRA rank."""
    more_d, more_o = (-size % WIDTH for size in (x_SD.shape[1], weight_EOD.shape[1]))
    if more_d or more_o:
        x_SD, weight_EOD = pad(x_SD, (0, more_d)), pad(weight_EOD, (0, more_d, 0, more_o))
    return x_SD, weight_EOD.mT
