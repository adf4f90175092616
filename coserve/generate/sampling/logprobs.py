"""Log-probabilities of chosen tokens and of the likeliest ones. Nothing here waits for the device but `entries`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.core.types import TokenLogprob
from coserve.generate.sampling.transfer import fetch

_CHUNK = 256


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
