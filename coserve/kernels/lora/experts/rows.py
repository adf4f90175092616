"""The rows that a mixture of experts computes in one call, sorted by expert, and products with each expert's matrix.

T tokens, K experts chosen by each, S = T K rows, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, pad

from coserve.kernels.gpu.rounding import cdiv

FEW_ROWS = 4096
"""Most rows that one kernel sorts (decode steps). More are sorted by torch, in ten launches."""
BLOCK, CHUNK = 8, 1024
"""Sizes of `order_rows`: rows (or experts) per program, and rows that it compares them with at once."""
WIDTH = 8
"""Rows of `grouped_mm`'s 16-bit operands must be a multiple of this many elements."""


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """The rows of one call, sorted by expert."""

    place_S: Tensor  # noqa: N815
    """The row of each (token, choice) pair; pairs are in the order of the flattened (T, K)."""
    expert_S: Tensor  # noqa: N815
    """Each row's expert. E: an expert of another GPU; such rows come last and are not computed."""
    token_S: Tensor  # noqa: N815
    ends_E: Tensor  # noqa: N815
    """Index one past each expert's last row: int32."""
    chosen: int
    """K: experts chosen by each token."""

    @classmethod
    def by_expert(cls, chosen_TK: Tensor, experts: int, slots_T: Tensor | None = None, slots: int = 0) -> ExpertRows:
        """Sort the rows by expert, then by their token's slot, if given. `chosen_TK`: the experts of each token;
        `slots_T`: int32, from -1 to `slots` - 1; entries beyond the T tokens are ignored. The order is stable."""
        if chosen_TK.is_cuda and chosen_TK.numel() <= FEW_ROWS:
            return cls(*counted(chosen_TK, experts, slots_T, slots), chosen_TK.shape[1])
        key_TK = chosen_TK
        if slots_T is not None:
            key_TK = torch.add(slots_T[: len(chosen_TK), None], chosen_TK, alpha=slots + 1)
        order_S = torch.argsort(key_TK.reshape(-1), stable=True)
        expert_S, place_S = chosen_TK.reshape(-1)[order_S], torch.empty_like(order_S)
        place_S[order_S] = torch.arange(order_S.shape[0], device=order_S.device)
        return cls(place_S, expert_S, order_S // chosen_TK.shape[1], ends_of(expert_S, experts), chosen_TK.shape[1])

    @property
    def experts(self) -> int:
        """E: number of experts on this rank."""
        return len(self.ends_E)


def counted(
    chosen_TK: Tensor, experts: int, slots_T: Tensor | None, slots: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the first four fields of `ExpertRows.by_expert`, by one kernel. Its work grows with the square of the
    rows. It is launched inside `compile_only`, too, because later code uses its results as indices."""
    from coserve.kernels.lora.experts.order_kernel import order_rows  # bases on a CPU need no Triton

    count, chosen = chosen_TK.numel(), chosen_TK.shape[1]
    place_S, expert_S, token_S = (chosen_TK.new_empty(count, dtype=torch.int64) for _ in range(3))
    ends_E = chosen_TK.new_empty(experts, dtype=torch.int32)
    order_rows[(cdiv(count, BLOCK) + cdiv(experts, BLOCK),)](
        chosen_TK.reshape(-1),
        chosen_TK if slots_T is None else slots_T,
        place_S,
        expert_S,
        token_S,
        ends_E,
        count,
        chosen,
        experts,
        slots,
        SLOTS=slots_T is not None,
        BLOCK=BLOCK,
        CHUNK=CHUNK,
        num_warps=4,
    )
    return place_S, expert_S, token_S, ends_E


def summed(y_SO: Tensor, place_S: Tensor, weights_TK: Tensor) -> Tensor:
    """Return each token's weighted sum of its experts' outputs: (T, O)."""
    return (y_SO[place_S].view(*weights_TK.shape, y_SO.shape[1]) * weights_TK.unsqueeze(-1)).sum(1)


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
