"""Sampling operations on logits, as tensors: nothing here waits for the device. A row's result does not depend on its
batch.

Probabilities become *weights*: integers up to `UNIT`, the weight of the most likely token, with 24 significant bits.
Their sums are exact in fp64 in any order, so a choice is the same on every device and in every kernel with the same
weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coserve.kernels.sampling import launch
from coserve.kernels.sampling.constants import GREEDY_BELOW, NOT_FINITE, UNIT

OUTPUT_COUNT, PROMPT_COUNT = 2, 1
"""Increments of a token's entry in the count table: `OUTPUT_COUNT` for each occurrence in the output, `PROMPT_COUNT`
once if it is in the prompt."""


def likeliest(logits_BV: Tensor) -> Tensor:
    """(B) argmax of the logits, the lowest id among equals; `NOT_FINITE` where a row has no finite maximum."""
    if logits_BV.is_cuda:
        return launch.likeliest(logits_BV)
    value, token = logits_BV.max(-1)
    return torch.where(value.isfinite(), token, NOT_FINITE)


def penalise_(logits_BV: Tensor, rows_P: Tensor, counts_NV: Tensor, slots_P: Tensor, penalties_PK: Tensor) -> None:
    """Apply penalties in place to rows `rows_P` of fp32 logits.

    Rows `slots_P` of the int32 table `counts_NV` hold for each token twice its count in the output, plus 1 if it is in
    the prompt. fp32 `penalties_PK`: repetition (for tokens in prompt or output), presence, frequency.
    """
    if logits_BV.is_cuda:
        launch.penalise_(logits_BV, rows_P, counts_NV, slots_P, penalties_PK)
        return
    repetition, presence, frequency = torch.split(penalties_PK, 1, dim=1)
    logits, counts = logits_BV.index_select(0, rows_P), counts_NV.index_select(0, slots_P)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(counts != 0, repeated, logits)
    times = counts // OUTPUT_COUNT
    logits = torch.where(times > 0, logits - (frequency * times + presence), logits)
    logits_BV.index_copy_(0, rows_P, logits)


def mask_(logits_BV: Tensor, rows_M: Tensor, bits_MW: Tensor) -> None:
    """Set logits of forbidden tokens to -inf, in place, in rows `rows_M` of fp32 logits. Bit i of a row of the int32
    words `bits_MW` is token i: 0 if it is forbidden."""
    if logits_BV.is_cuda:
        launch.mask_(logits_BV, rows_M, bits_MW)
        return
    places = torch.arange(logits_BV.shape[1], device=logits_BV.device)
    allowed = (bits_MW.index_select(1, places // 32) >> (places % 32).int()) & 1
    logits_BV.index_copy_(0, rows_M, logits_BV.index_select(0, rows_M).masked_fill(allowed == 0, -torch.inf))


def draw(logits_BV: Tensor, likeliest_B: Tensor, columns_BK: Tensor, *, filters: bool) -> Tensor:
    """(B) sampled tokens: the inverse CDF of each row, over tokens in order of id, at the row's uniform number.

    `likeliest_B`: argmax of the same logits; it is the result where it is `NOT_FINITE` or the temperature below
    `GREEDY_BELOW`. `columns_BK`: fp64: temperature, min-p, top-k (infinite: none), top-p, and the uniform number.
    `filters`: whether any row has a top-k or top-p. Among equal weights, top-k and top-p keep lower ids first.
    """
    if logits_BV.is_cuda:
        return launch.draw(logits_BV, likeliest_B, columns_BK, filters=filters)
    temperature, min_p, top_k, top_p, number = torch.split(columns_BK, 1, dim=1)
    kept = weights(logits_BV, temperature, min_p)
    if filters:
        kept = _filtered(kept, top_k, top_p)
    mass = kept.double().cumsum(-1)
    goal = (number * mass[:, -1:]).floor().minimum(mass[:, -1:] - 1)  # so that searchsorted finds a token
    token = torch.searchsorted(mass, goal, right=True)[:, 0]
    return torch.where((temperature[:, 0] < GREEDY_BELOW) | (likeliest_B < 0), likeliest_B, token)


def weights(logits_BV: Tensor, temperature_B1: Tensor, min_p_B1: Tensor) -> Tensor:
    """fp32 (B, V): integers proportional to the probabilities; 0 below min-p."""
    logits = logits_BV.double()
    shares = ((logits - logits.amax(-1, keepdim=True)) * (1.0 / temperature_B1.clamp_min(GREEDY_BELOW))).exp()
    return (shares.masked_fill(shares < min_p_B1, 0.0) * UNIT + 0.5).floor().float()


def _filtered(weights_BV: Tensor, top_k_B1: Tensor, top_p_B1: Tensor) -> Tensor:
    """Set weights outside of top-k, and then outside of top-p, to 0."""
    ordered, ids = weights_BV.sort(stable=True, dim=-1, descending=True)
    ordered = ordered.masked_fill(torch.arange(ordered.shape[1], device=ordered.device) >= top_k_B1, 0.0)
    mass = ordered.double().cumsum(-1)
    limit = (top_p_B1 * mass[:, -1:]).clamp_min(0.5)  # the first is always kept
    return torch.zeros_like(weights_BV).scatter_(1, ids, ordered.masked_fill(mass - ordered >= limit, 0.0))
