"""LoRA terms of multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1) that absorbs
the up-projection W of keys and values instead of expanding the latents.

W (H (N + E), D) makes from a latent of D numbers each head's key of N numbers and value of E. A query q of a head with
the rows W_K then meets the latents as W_Kᵀ q, and weighted latents o become the output W_V o. An adapter's pair at W
changes both, by `scaling Aᵀ (B_Kᵀ q)` and `scaling B_V (A o)` with the head's rows of B.

Letters: T tokens, H heads, D numbers of a latent, N and E of a head's key and value, R LoRA rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from coserve.kernels.gpu.rounding import CPU_MIN_ROWS
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair


class HeadSizes(NamedTuple):
    """Numbers of one head in an output of the up-projection: keys first."""

    keys: int
    """N: without those that carry a rotary position."""
    values: int
    """E."""


def product(x_HTI: Tensor, weight_HIO: Tensor) -> Tensor:
    """Return each head's `x W`: (H, T, O). On CPU a row's bits do not depend on the others."""
    few = CPU_MIN_ROWS - x_HTI.shape[1]
    if x_HTI.device.type == "cpu" and few > 0:
        return torch.bmm(pad(x_HTI, (0, 0, 0, few)), weight_HIO)[:, :-few]
    return torch.bmm(x_HTI, weight_HIO)


def add_query_terms(
    y_HTD: Tensor, q_HTN: Tensor, sizes: HeadSizes, segments: Segments, pairs: Sequence[LoraPair | None]
) -> None:
    """Add `scaling Aᵀ (B_Kᵀ q)` to the absorbed queries, in place, adapter by adapter. `pairs`: see
    `SitewiseLora.pairs`."""
    for rows_T, a_RD, b_HOR in _adapters(segments, pairs, len(y_HTD), y_HTD.device):
        h_HTR = product(q_HTN[:, rows_T], b_HOR[:, : sizes.keys])
        y_HTD[:, rows_T] += product(h_HTR, a_RD.expand(len(y_HTD), -1, -1))


def add_output_terms(
    y_HTE: Tensor, x_HTD: Tensor, sizes: HeadSizes, segments: Segments, pairs: Sequence[LoraPair | None]
) -> None:
    """Add `scaling B_V (A o)` to the outputs, in place, adapter by adapter."""
    for rows_T, a_RD, b_HOR in _adapters(segments, pairs, len(y_HTE), y_HTE.device):
        h_HTR = product(x_HTD[:, rows_T], a_RD.T.expand(len(y_HTE), -1, -1))
        y_HTE[:, rows_T] += product(h_HTR, b_HOR[:, sizes.keys :].mT)


def _adapters(
    segments: Segments, pairs: Sequence[LoraPair | None], heads: int, device: torch.device
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return each adapter's rows, its A (R, D), and `scaling B` by heads (H, N + E, R)."""
    found = []
    for adapter, runs in segments.runs.items():
        pair = pairs[adapter]
        if pair is not None:
            whole = pair.dense()
            rows_T = torch.tensor([row for start, end in runs for row in range(start, end)], device=device)
            found.append((rows_T, whole.a_RD, (whole.b_OR * pair.scaling).view(heads, -1, pair.rank)))
    return found
