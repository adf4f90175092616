"""One packed step: the shares of many sequences side by side, those of one adapter together."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.generate.sampling.scoring import Score, score_of
from coserve.generate.schedule import Share
from coserve.generate.sequences import Sequence
from coserve.kernels.attention.interface import Run
from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.segments import Segments
from coserve.model.lora import LoraBatch, LoraWeights
from coserve.types import AdapterRef


@dataclass(frozen=True)
class Batch:
    """T rows: the runs of the shares, one after another."""

    tokens_T: Tensor  # noqa: N815
    positions_T: Tensor  # noqa: N815
    keep: Tensor
    """Rows whose logits are wanted: the last one of each of `ready`, in order, then those of `scores`."""
    ready: tuple[Sequence, ...]
    """Sequences whose next token this step chooses."""
    scores: tuple[Score, ...]
    """Prompts that are to be scored, the part of each that this step computes."""
    shares: tuple[Share, ...]
    runs: tuple[Run, ...]
    """Where attention finds each share, in the same order."""
    lora: LoraBatch | None


def by_adapter(shares: Iterable[Share]) -> dict[AdapterRef | None, list[Share]]:
    """Shares of each adapter in order of its first appearance; those of the base alone come last."""
    groups: dict[AdapterRef | None, list[Share]] = {}
    for share in shares:
        groups.setdefault(share.sequence.adapter, []).append(share)
    if None in groups:
        groups[None] = groups.pop(None)
    return groups


def pack(shares: Items[Share], *, backend: LoraBackend, device: torch.device) -> list[Batch]:
    """One batch; or one per adapter if that is how the backend runs a step."""
    groups = by_adapter(shares)
    if backend.one_adapter_a_step:
        return [_batch({adapter: group}, backend, device) for adapter, group in groups.items()]
    return [_batch(groups, backend, device)] if groups else []


def _batch(groups: dict[AdapterRef | None, list[Share]], backend: LoraBackend, device: torch.device) -> Batch:
    tokens: list[int] = []
    positions: list[int] = []
    keep: list[int] = []
    score_rows: list[int] = []
    scores: list[Score] = []
    ready: list[Sequence] = []
    runs: list[Run] = []
    bounds, slots, adapters = [0], list[int](), list[LoraWeights]()
    for group in groups.values():
        for share in group:
            sequence, start, end = share.sequence, share.sequence.computed, share.sequence.computed + share.tokens
            tokens.extend(sequence.tokens[start:end])
            positions.extend(range(start, end))
            runs.append(Run(share.tokens, start, tuple(sequence.pages)))
            if (score := score_of(share)) is not None:
                scores.append(score[0])
                score_rows.extend(len(tokens) - share.tokens + row for row in score[1])
            if share.tokens == sequence.pending and sequence.max_tokens:
                keep.append(len(tokens) - 1)
                ready.append(sequence)
        weights = group[0].sequence.weights
        if weights is not None:
            slots.append(len(adapters))
            adapters.append(weights)
            bounds.append(len(tokens))
    if None in groups:
        slots.append(-1)
        bounds.append(len(tokens))
    return Batch(
        tokens_T=torch.tensor(tokens, device=device),
        positions_T=torch.tensor(positions, device=device),
        keep=torch.tensor(keep + score_rows, dtype=torch.long, device=device),
        ready=tuple(ready),
        scores=tuple(scores),
        shares=tuple(share for group in groups.values() for share in group),
        runs=tuple(runs),
        lora=LoraBatch(Segments(tuple(bounds), tuple(slots)), tuple(adapters), backend) if adapters else None,
    )
