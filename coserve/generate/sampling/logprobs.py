"""Log-probabilities of sampled and of top tokens. Only `entries` waits for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.core.logprobs import TokenLogprob
from coserve.generate.sampling.transfer import fetch

_CHUNK = 256


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of sampled and of top tokens, from raw logits, for some rows of a batch."""

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    """Top tokens that each of the rows requests."""
    values: Tensor
    """fp32 (A, 1 + n): the sampled token's, then the n top tokens'."""
    ids: Tensor
    """int64 (A, n): the n top tokens."""

    def fetch(self) -> Logprobs:
        """Return a host copy, filled asynchronously."""
        return Logprobs(self.rows, self.counts, fetch(self.values), fetch(self.ids))

    def entries(self) -> dict[int, TokenLogprob]:
        """Host values by row. Waits for the device, unless the tensors are on the host."""
        found = {}
        for row, count, values, ids in zip(
            self.rows, self.counts, self.values.tolist(), self.ids.tolist(), strict=True
        ):
            top = tuple(zip(ids[:count], values[1 : 1 + count], strict=True))
            found[row] = TokenLogprob(values[0], top)
        return found


def logprobs_of(logits_AV: Tensor, chosen_A: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return `Logprobs.values` and `Logprobs.ids` (A, n) for raw logits; equal logits are ordered by id."""
    ids = _top(logits_AV, min(n, logits_AV.shape[1]))
    logprobs = logits_AV.log_softmax(-1, dtype=torch.float32)
    return logprobs.gather(1, torch.cat([chosen_A.clamp_min(0)[:, None], ids], 1)), ids


def _top(logits_AV: Tensor, n: int) -> Tensor:
    """int64 (A, n): the n top tokens, searched in the n chunks with the highest maxima."""
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
    """int64 (A, n or fewer): ids of the highest values, in order, lower ids first among equals."""
    bits = (values_AN + 0.0).view(torch.int32)  # no negative zeros
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys = ((ordered << 32) | (0xFFFFFFFF - ids)).topk(min(n, values_AN.shape[1]), dim=-1).values
    return 0xFFFFFFFF - (keys & 0xFFFFFFFF)
