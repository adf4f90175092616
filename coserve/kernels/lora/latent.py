"""LoRA terms of multi-head latent attention (MLA; DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1) that
absorbs the up-projection `kv_b_proj` of latents instead of expanding them.

The weight of `kv_b_proj` (H (N + E), L) has N rows W_UK and E rows W_UV for each head. A query q meets the latents as
`W_UKᵀ q`, and weighted latents o become the output `W_UV o`. An adapter's pair changes both, by `scaling Aᵀ (B_UKᵀ q)`
and `scaling B_UV (A o)` with the same rows of B.

Letters: T tokens, H heads, L numbers of a latent, N of a head's key without a position, E of its value, R LoRA rank;
O = N + E.
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
    """Rows of one head in the weight of `kv_b_proj`: those of the key come first."""

    nope: int
    """N: `qk_nope_head_dim`."""
    value: int
    """E: `v_head_dim`."""


def multiply_heads(x_HTI: Tensor, weight_HIO: Tensor) -> Tensor:
    """Return each head's `x W`: (H, T, O). On CPU a row's bits do not depend on the others."""
    few = CPU_MIN_ROWS - x_HTI.shape[1]
    if x_HTI.device.type == "cpu" and few > 0:
        return torch.bmm(pad(x_HTI, (0, 0, 0, few)), weight_HIO)[:, :-few]
    return torch.bmm(x_HTI, weight_HIO)


def add_query_terms(
    y_HTL: Tensor, q_HTN: Tensor, sizes: HeadSizes, segments: Segments, pairs: Sequence[LoraPair | None]
) -> None:
    """Add `scaling Aᵀ (B_UKᵀ q)` to the absorbed queries y, in place, adapter by adapter. `pairs`: see
    `SitewiseLora.pairs`."""
    for rows_T, a_RL, b_HOR in _adapters(segments, pairs, len(y_HTL), y_HTL.device):
        h_HTR = multiply_heads(q_HTN[:, rows_T], b_HOR[:, : sizes.nope])
        y_HTL[:, rows_T] += multiply_heads(h_HTR, a_RL.expand(len(y_HTL), -1, -1))


def add_output_terms(
    y_HTE: Tensor, x_HTL: Tensor, sizes: HeadSizes, segments: Segments, pairs: Sequence[LoraPair | None]
) -> None:
    """Add `scaling B_UV (A x)` to the outputs y, in place, adapter by adapter. x: weighted latents."""
    for rows_T, a_RL, b_HOR in _adapters(segments, pairs, len(y_HTE), y_HTE.device):
        h_HTR = multiply_heads(x_HTL[:, rows_T], a_RL.T.expand(len(y_HTE), -1, -1))
        y_HTE[:, rows_T] += multiply_heads(h_HTR, b_HOR[:, sizes.nope :].mT)


def _adapters(
    segments: Segments, pairs: Sequence[LoraPair | None], heads: int, device: torch.device
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return each adapter's rows, its A (R, L), and `scaling B` by heads (H, O, R)."""
    found = []
    for adapter, runs in segments.runs.items():
        pair = pairs[adapter]
        if pair is not None:
            whole = pair.dense()
            rows_T = torch.tensor([row for start, end in runs for row in range(start, end)], device=device)
            found.append((rows_T, whole.a_RD, (whole.b_OR * pair.scaling).view(heads, -1, pair.rank)))
    return found
