"""Log-probabilities of prompt tokens, as the prompt's chunks are computed.

A row of logits at position p scores prompt token p + 1. No more than `CHUNK` rows are ever in fp32 at once: the whole
chunk of a prompt with a vocabulary of 128k would be gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.generate.schedule import Share
from coserve.generate.sequences import Sequence
from coserve.types import TokenLogprob

CHUNK = 64
"""Rows of logits that are normalised at once."""


@dataclass(frozen=True)
class Score:
    """Rows of a step that score prompt tokens `first` to `first + rows - 1` of a sequence."""

    sequence: Sequence
    first: int
    rows: int

    @property
    def targets(self) -> tuple[int, ...]:
        return self.sequence.request.prompt[self.first : self.first + self.rows]


def score_of(share: Share) -> tuple[Score, range] | None:
    """What the share's rows score that was not scored before, and which of its rows (from 0) do; None if nothing."""
    sequence = share.sequence
    if sequence.sampling.prompt_logprobs is None:
        return None
    prompt = len(sequence.request.prompt)
    assert sequence.scored == prompt or sequence.computed < sequence.scored, "rows that score the prompt were skipped"
    first = max(sequence.scored, sequence.computed + 1)
    end = min(sequence.computed + share.tokens + 1, prompt)
    if first >= end:
        return None
    start = first - 1 - sequence.computed
    return Score(sequence, first, end - first), range(start, start + end - first)


def prompt_logprobs(logits_KV: Tensor, scores: Items[Score]) -> list[tuple[TokenLogprob, ...] | None]:
    """Entries of each score, whose rows of logits follow one another; None where logits are not finite."""
    found: list[tuple[TokenLogprob, ...] | None] = []
    at = 0
    for score in scores:
        top = min(score.sequence.sampling.prompt_logprobs or 0, logits_KV.shape[1])
        entries: list[TokenLogprob] = []
        for start in range(0, score.rows, CHUNK):
            targets = score.targets[start : start + CHUNK]
            entries += _entries(logits_KV[at + start : at + start + len(targets)], targets, top)
        at += score.rows
        found.append(None if any(entry.logprob != entry.logprob for entry in entries) else tuple(entries))
    return found


def _entries(logits_CV: Tensor, targets: Items[int], top: int) -> list[TokenLogprob]:
    logprobs = logits_CV.float().log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(targets, device=logprobs.device)[:, None])[:, 0].tolist()
    if not top:
        return [TokenLogprob(value) for value in chosen]
    values, ids = (part.tolist() for part in logprobs.topk(top, dim=-1))
    return [
        TokenLogprob(value, tuple(zip(*pair, strict=True)))
        for value, pair in zip(chosen, zip(ids, values, strict=True), strict=True)
    ]
