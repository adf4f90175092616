"""What sampling does to logits, as tensors: nothing here waits for the device. A row's result is the same in any batch.

Probabilities become *weights*: integers up to `UNIT`, that of the likeliest token, of 24 significant bits. Their sums are
exact in fp64, so a sum is the same in whatever order it is made, and a choice is the same on every device and in every
kernel that agrees on the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.kernels.sampling import launch
from coserve.kernels.sampling.constants import GREEDY_BELOW, NOT_FINITE, UNIT
from coserve.types import TokenLogprob

_CHUNK = 256
SAID_ONCE = 2
"""What an output token adds to its entry of the table of what was said; a token of the prompt sets the lowest bit."""


def likeliest(logits_BV: Tensor) -> Tensor:
    """(B) the first token of the highest logit; `NOT_FINITE` where a row has no finite maximum."""
    if logits_BV.is_cuda:
        return launch.likeliest(logits_BV)
    value, token = logits_BV.max(-1)
    return torch.where(value.isfinite(), token, NOT_FINITE)


def penalise_(logits_BV: Tensor, rows_P: Tensor, said_NV: Tensor, slots_P: Tensor, penalties_PK: Tensor) -> None:
    """Penalties, in place on rows `rows_P` of fp32 logits.

    Rows `slots_P` of the int32 table `said_NV` hold for each token twice its count in the output, plus 1 if it is in the
    prompt. fp32 `penalties_PK`: repetition (of what is in prompt or output), presence, frequency.
    """
    if logits_BV.is_cuda:
        launch.penalise_(logits_BV, rows_P, said_NV, slots_P, penalties_PK)
        return
    repetition, presence, frequency = torch.split(penalties_PK, 1, dim=1)
    logits, said = logits_BV.index_select(0, rows_P), said_NV.index_select(0, slots_P)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(said != 0, repeated, logits)
    times = said // SAID_ONCE
    logits = torch.where(times > 0, logits - (frequency * times + presence), logits)
    logits_BV.index_copy_(0, rows_P, logits)


def draw(logits_BV: Tensor, likeliest_B: Tensor, columns_BK: Tensor, *, filters: bool) -> Tensor:
    """(B) tokens, each at its row's uniform number in the row's distribution over the tokens in order of their ids.

    `likeliest_B`: of the same logits; it is the result where it is `NOT_FINITE` or the temperature below
    `GREEDY_BELOW`. `columns_BK`: fp64: temperature, min-p, top-k (infinite: none), top-p, and the uniform number.
    `filters`: whether any row has a top-k or top-p. Of equal weights those of lower ids come first in top-k and top-p.
    """
    if logits_BV.is_cuda:
        return launch.draw(logits_BV, likeliest_B, columns_BK, filters=filters)
    temperature, min_p, top_k, top_p, number = torch.split(columns_BK, 1, dim=1)
    kept = weights(logits_BV, temperature, min_p)
    if filters:
        kept = _filtered(kept, top_k, top_p)
    mass = kept.double().cumsum(-1)
    goal = (number * mass[:, -1:]).floor().minimum(mass[:, -1:] - 1)  # so that some place lies above it
    token = torch.searchsorted(mass, goal, right=True)[:, 0]
    return torch.where((temperature[:, 0] < GREEDY_BELOW) | (likeliest_B < 0), likeliest_B, token)


def weights(logits_BV: Tensor, temperature_B1: Tensor, min_p_B1: Tensor) -> Tensor:
    """fp32 (B, V): whole numbers in proportion to the probabilities; 0 for those below min-p."""
    logits = logits_BV.double()
    shares = ((logits - logits.amax(-1, keepdim=True)) * (1.0 / temperature_B1.clamp_min(GREEDY_BELOW))).exp()
    return (shares.masked_fill(shares < min_p_B1, 0.0) * UNIT + 0.5).floor().float()


def _filtered(weights_BV: Tensor, top_k_B1: Tensor, top_p_B1: Tensor) -> Tensor:
    """The weights with those outside of top-k, and of top-p of the rest, set to 0."""
    ordered, ids = weights_BV.sort(stable=True, dim=-1, descending=True)
    ordered = ordered.masked_fill(torch.arange(ordered.shape[1], device=ordered.device) >= top_k_B1, 0.0)
    mass = ordered.double().cumsum(-1)
    limit = (top_p_B1 * mass[:, -1:]).clamp_min(0.5)  # the first is always kept
    return torch.zeros_like(weights_BV).scatter_(1, ids, ordered.masked_fill(mass - ordered >= limit, 0.0))


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of chosen tokens and of the likeliest ones, of raw logits, for some rows of a batch."""

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    """Likeliest tokens that each of the rows asks for."""
    values: Tensor
    """fp32 (A, 1 + n): of the chosen token, then of the n likeliest."""
    ids: Tensor
    """int64 (A, n)."""

    def fetch(self) -> Logprobs:
        """A copy on the host, which is filled in the background."""
        return Logprobs(self.rows, self.counts, fetch(self.values), fetch(self.ids))

    def entries(self) -> dict[int, TokenLogprob]:
        """By row. Waits for the device, unless the tensors are on the host."""
        found = {}
        for row, count, values, ids in zip(
            self.rows, self.counts, self.values.tolist(), self.ids.tolist(), strict=True
        ):
            top = tuple(zip(ids[:count], values[1 : 1 + count], strict=True))
            found[row] = TokenLogprob(values[0], top)
        return found


def fetch(tensor: Tensor) -> Tensor:
    """A copy on the host, which is there once the device has come so far."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def logprobs_of(logits_AV: Tensor, chosen_A: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """`Logprobs.values` and `ids` (A, n) of raw logits; of equal logits those of lower ids come first."""
    ids = _top(logits_AV, min(n, logits_AV.shape[1]))
    logprobs = logits_AV.log_softmax(-1, dtype=torch.float32)
    return logprobs.gather(1, torch.cat([chosen_A.clamp_min(0)[:, None], ids], 1)), ids


def _top(logits_AV: Tensor, n: int) -> Tensor:
    """int64 (A, n): the n likeliest tokens, found among the n chunks with the highest maxima."""
    rows, vocab = logits_AV.shape
    if not n:
        return torch.empty(rows, 0, dtype=torch.int64, device=logits_AV.device)
    width = _CHUNK if vocab % _CHUNK == 0 else vocab
    chunks = logits_AV.view(rows, vocab // width, width)
    best = _first(chunks.amax(-1).float(), torch.arange(vocab // width, device=logits_AV.device), n)
    within = best[:, :, None] * width + torch.arange(width, device=logits_AV.device)
    ids = within.flatten(1)
    return _first(logits_AV.gather(1, ids).float(), ids, n)


def _first(values_AN: Tensor, ids: Tensor, n: int) -> Tensor:
    """int64 (A, n or fewer): ids of the highest values, in their order, lower ids first among equals."""
    bits = (values_AN + 0.0).view(torch.int32)  # no negative zeros
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys = ((ordered << 32) | (0xFFFFFFFF - ids)).topk(min(n, values_AN.shape[1]), dim=-1).values
    return 0xFFFFFFFF - (keys & 0xFFFFFFFF)
