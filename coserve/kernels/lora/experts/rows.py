"""The rows that a mixture of experts computes in one call, sorted by expert, and products with each expert's matrix.

T tokens, K experts chosen by each, S = T K rows, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, pad

WIDTH = 8
"""Elements that a row of `grouped_mm`'s operands must be a multiple of, in 16 bits."""


class ExpertRows:
    """The rows of one call, sorted by expert."""

    def __init__(self, chosen_TK: Tensor, experts: int) -> None:
        """`chosen_TK`: the experts of each token."""
        self.chosen, self.experts = chosen_TK.shape[1], experts
        self.expert_S, self.order_S = torch.sort(chosen_TK.reshape(-1), stable=True)
        self.token_S = self.order_S // self.chosen
        self.ends_E = ends_of(self.expert_S, experts)

    def summed(self, y_SO: Tensor, weights_TK: Tensor) -> Tensor:
        """Return each token's sum of its experts' outputs by these weights: (T, O)."""
        weighted_SO = y_SO * weights_TK.reshape(-1)[self.order_S].unsqueeze(-1)
        back_S = torch.empty_like(self.order_S).scatter_(
            0, self.order_S, torch.arange(len(self.order_S), device=y_SO.device)
        )
        return weighted_SO[back_S].view(-1, self.chosen, y_SO.shape[1]).sum(1)


def ends_of(group_S: Tensor, groups: int) -> Tensor:
    """Return the row behind the last one of each group of sorted rows: int32 (groups). Waits for nothing."""
    ids = torch.arange(groups, device=group_S.device, dtype=group_S.dtype)
    return torch.searchsorted(group_S, ids, right=True).to(torch.int32)


def grouped(x_SD: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
    """Return `x Wᵀ` (S, O) with the matrix of each row's expert. Differentiable. On a GPU it is one launch."""
    if x_SD.device.type == "cuda":
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
