"""The loss of a micro-batch, and how many targets are predicted, from the logits of the targets, chunk by chunk: the logits of all of them
are never in memory at once.

Letters: T packed tokens, D hidden, V vocabulary, K targets, J jobs, Q sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from coserve.finetune.losses.formulas import divergence, negative_log_likelihood, preference, token_losses
from coserve.finetune.packed_rows import PackedRows
from coserve.parallel.vocabulary import VocabularyShard


@dataclass(frozen=True)
class TargetChunk:
    """Targets whose logits are computed at once."""

    keep_K: Tensor  # noqa: N815
    labels_K: Tensor  # noqa: N815
    counts: Mapping[int, int]
    """How many of them are whose, by job, in their order."""

    def by_job(self, x_K: Tensor) -> Sequence[Tensor]:
        """`x_K` (K, ...) in a part for each job of `counts`."""
        return [x_K] if len(self.counts) == 1 else torch.split(x_K, list(self.counts.values()))


def target_chunks(rows: PackedRows, size: int) -> list[TargetChunk]:
    """All targets, at most `size` in a chunk."""
    found = []
    for start in range(0, rows.targets, size):
        stop = min(start + size, rows.targets)
        own = [min(last, stop) - max(first, start) for first, last in pairwise(rows.target_bounds)]
        counts = {job: count for job, count in enumerate(own) if count > 0}
        found.append(TargetChunk(rows.keep_K[start:stop], rows.labels_K[start:stop], counts))
    return found


class ChunkedLoss(Protocol):
    """One micro-batch's loss, under way."""

    def add(self, logits: Tensor, chunk: TargetChunk) -> Sequence[Tensor]:
        """The next chunk's logits (K, V), or this rank's part of them. Returns what the gradient in the last hidden states is computed
        of: scalars, which are added up."""
        ...

    def finish(self, gradient_1TD: Tensor | None) -> Tensor:
        """After the last chunk: the result. `gradient_1TD`: the sum of the chunks' gradients in the last hidden states, which becomes
        that of the loss, in place; None in an evaluation."""
        ...


class Likelihood:
    """The NLL of the labels, summed for each job. Result: each job's sums (fp64, (J, 2)), the loss and how many targets are predicted."""

    def __init__(self, rows: PackedRows, shard: VocabularyShard | None) -> None:
        self._shard = shard
        self._sums_J2 = _zero_sums(rows)

    def add(self, logits: Tensor, chunk: TargetChunk) -> Sequence[Tensor]:
        found = [
            negative_log_likelihood(own, labels_K, self._shard)
            for own, labels_K in zip(chunk.by_job(logits), chunk.by_job(chunk.labels_K), strict=True)
        ]
        for job, (loss, predicted) in zip(chunk.counts, found, strict=True):
            self._sums_J2[job] += torch.stack((loss.detach().double(), predicted))
        return [loss for loss, _ in found]

    def finish(self, gradient_1TD: Tensor | None) -> Tensor:
        return self._sums_J2


class Divergence:
    """The divergence from a teacher, of one job. Result: its sums (fp64, (1, 2)), as of `Likelihood`."""

    def __init__(
        self, rows: PackedRows, teacher: Callable[[TargetChunk], Tensor], shard: VocabularyShard | None
    ) -> None:
        """`teacher`: its logits of a chunk, without gradients."""
        self._teacher, self._shard = teacher, shard
        self._sums_J2 = _zero_sums(rows)

    def add(self, logits: Tensor, chunk: TargetChunk) -> Sequence[Tensor]:
        loss, predicted = divergence(logits, self._teacher(chunk), chunk.labels_K, self._shard)
        self._sums_J2[0] += torch.stack((loss.detach().double(), predicted))
        return [loss]

    def finish(self, gradient_1TD: Tensor | None) -> Tensor:
        return self._sums_J2


class SequenceLosses:
    """The NLL of each sequence's labels, summed. Result: fp64, (Q)."""

    def __init__(self, rows: PackedRows, shard: VocabularyShard | None) -> None:
        self._rows, self._shard = rows, shard
        self._chunks: list[Tensor] = []
        self._predicted = torch.zeros((), dtype=torch.int64, device=rows.keep_K.device)

    def add(self, logits: Tensor, chunk: TargetChunk) -> Sequence[Tensor]:
        losses_K, predicted = token_losses(logits, chunk.labels_K, self._shard)
        self._predicted += predicted
        self._chunks.append(losses_K.detach())
        return [losses_K.sum()]

    def finish(self, gradient_1TD: Tensor | None) -> Tensor:
        losses_K = torch.cat(self._chunks).double()  # sums without atomics: they have the same bits each time
        return torch.stack([own.sum() for own in torch.split(losses_K, list(self._rows.sequence_targets))])


class Preference(SequenceLosses):
    """The DPO loss of one job's pairs. Result: its sums (fp64, (1, 5)): the loss, how many targets are predicted, and those of the other
    three that `losses.formulas.preference` returns.

    A token's logits depend on its own hidden state alone. So the gradient of the loss in that state is the NLL's, times the gradient of
    the loss in the NLL of the token's sequence: the head is computed once, though the latter is known only after all chunks.
    """

    def __init__(self, rows: PackedRows, reference_Q: Tensor, beta: float, shard: VocabularyShard | None) -> None:
        """`reference_Q`: the result of `SequenceLosses` with the reference."""
        super().__init__(rows, shard)
        self._reference_Q, self._beta = reference_Q, beta

    def finish(self, gradient_1TD: Tensor | None) -> Tensor:
        losses_P2, reference_P2 = super().finish(None).view(-1, 2), self._reference_Q.view(-1, 2)
        sums, slopes_P2 = preference(losses_P2, reference_P2, self._beta)
        if gradient_1TD is not None:
            assert self._rows.sequences_T is not None, "expected rows of pairs"
            gradient_1TD *= slopes_P2.view(-1).float()[self._rows.sequences_T, None]
        return torch.cat((sums[:1], self._predicted.double().view(1), sums[1:]))[None]


def _zero_sums(rows: PackedRows) -> Tensor:
    """(fp64, (J, 2))"""
    return torch.zeros(len(rows.target_bounds) - 1, 2, dtype=torch.float64, device=rows.keep_K.device)
