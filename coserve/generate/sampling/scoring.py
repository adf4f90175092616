"""Log-probabilities of prompt tokens, computed chunk by chunk with the prompt.

The logits at position p score prompt token p + 1. At most `CHUNK` rows are in fp32 at once: a whole chunk of a prompt
with a vocabulary of 128k would take gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from msgspec import Struct
from torch import Tensor

from coserve.core.logprobs import TokenLogprob
from coserve.generate.sampling.transfer import send_ids

CHUNK = 64
"""Rows of logits that are normalised at once."""


class PromptScoring(Struct, frozen=True, array_like=True):
    """Rows of a sequence's chunk that score prompt tokens."""

    first_row: int
    """First row of the chunk that scores, from 0; the others follow."""
    targets: tuple[int, ...]
    """The tokens that the rows score."""
    top: int
    """Number of top tokens to return for each."""


def prompt_logprobs(
    logits_KV: Tensor, scorings: Sequence[PromptScoring], chunk: int = CHUNK
) -> list[tuple[TokenLogprob, ...] | None]:
    """Return the entries of each scoring, whose rows of logits are consecutive; None where logits are not finite. Waits
    for the device once all are launched."""
    ends = [*accumulate((len(scoring.targets) for scoring in scorings), initial=0)]
    launched = [
        _launched(logits_KV[start:end], scoring, chunk)
        for scoring, start, end in zip(scorings, ends, ends[1:], strict=False)
    ]
    return [_entries(*own) for own in launched]


def _launched(logits_KV: Tensor, scoring: PromptScoring, chunk: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities (K, 1 + n), each target's and then the n top tokens', and the top tokens' ids (K, n)."""
    top = min(scoring.top, logits_KV.shape[1])
    (targets_K,) = send_ids(logits_KV.device, scoring.targets)
    values, ids = list[Tensor](), list[Tensor]()
    for logits_CV, targets_C in zip(torch.split(logits_KV, chunk), torch.split(targets_K, chunk), strict=True):
        logprobs = logits_CV.float().log_softmax(-1)
        best = logprobs.topk(top, dim=-1)
        values.append(torch.cat([logprobs.gather(1, targets_C[:, None]), best.values], 1))
        ids.append(best.indices)
    return torch.cat(values), torch.cat(ids)


def _entries(values_KN: Tensor, ids_KN: Tensor) -> tuple[TokenLogprob, ...] | None:
    rows = zip(values_KN.tolist(), ids_KN.tolist(), strict=True)
    entries = tuple([TokenLogprob(own, tuple(zip(ids, top, strict=True))) for (own, *top), ids in rows])
    return None if any(entry.logprob != entry.logprob for entry in entries) else entries
