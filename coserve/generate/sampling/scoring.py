"""Log-probabilities of prompt tokens, computed chunk by chunk with the prompt.

The logits at position p score prompt token p + 1. At most `CHUNK` rows are in fp32 at once: a whole chunk of a prompt
with a vocabulary of 128k would take gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor

from coserve.core.logprobs import TokenLogprob

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
    """Return the entries of each scoring, whose rows of logits are consecutive; None where logits are not finite."""
    found: list[tuple[TokenLogprob, ...] | None] = []
    at = 0
    for scoring in scorings:
        top = min(scoring.top, logits_KV.shape[1])
        entries: list[TokenLogprob] = []
        for start in range(0, len(scoring.targets), chunk):
            targets = scoring.targets[start : start + chunk]
            entries += _entries(logits_KV[at + start : at + start + len(targets)], targets, top)
        at += len(scoring.targets)
        found.append(None if any(entry.logprob != entry.logprob for entry in entries) else tuple(entries))
    return found


def _entries(logits_CV: Tensor, targets: Sequence[int], top: int) -> list[TokenLogprob]:
    logprobs = logits_CV.float().log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(targets, device=logprobs.device)[:, None])[:, 0].tolist()
    if not top:
        return [TokenLogprob(value) for value in chosen]
    values, ids = (part.tolist() for part in logprobs.topk(top, dim=-1))
    return [
        TokenLogprob(value, tuple(zip(*pair, strict=True)))
        for value, pair in zip(chosen, zip(ids, values, strict=True), strict=True)
    ]
