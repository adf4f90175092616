"""The loss of a micro-batch, and how many targets are predicted, from the logits of the targets, chunk by chunk: the
logits of all of them are never in memory at once.

Letters: T packed tokens, D hidden, V vocabulary, K targets, J jobs, Q sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from coserve.finetune.losses.formulas import divergence_, negative_log_likelihood_, preference
from coserve.finetune.packed_rows import PackedRows
from coserve.model.parallel.vocabulary import VocabularyShard


@dataclass(frozen=True)
class TargetChunk:
    """Targets whose logits are computed at once."""

    start: int
    """How many of the micro-batch's targets come before them."""
    keep_K: Tensor  # noqa: N815
    labels_K: Tensor  # noqa: N815

    def of(self, x_K: Tensor) -> Tensor:
        """Their part of a tensor (K, ...) of all targets."""
        return x_K[self.start : self.start + self.labels_K.shape[0]]


def target_chunks(rows: PackedRows, size: int) -> list[TargetChunk]:
    """All targets, at most `size` in a chunk."""
    starts = range(0, rows.targets, size)
    keeps, labels = torch.split(rows.keep_K, size), torch.split(rows.labels_K, size)
    return [TargetChunk(*one) for one in zip(starts, keeps, labels, strict=False)]  # no targets: splits have one part


class ChunkedLoss(Protocol):
    """One micro-batch's loss, under way."""

    def add(self, logits: Tensor, chunk: TargetChunk) -> None:
        """The next chunk's logits (K, V), or this rank's part of them, without gradients. They become, in place, the
        gradient of what is summed over the targets, up to the factors of `finish`."""
        ...

    def finish(self, gradient_1TD: Tensor | None) -> Tensor:
        """After the last chunk: the result. `gradient_1TD`: the sum of the chunks' gradients in the last hidden states,
        which becomes that of the loss, in place; None in an evaluation."""
        ...


class Likelihood:
    """The NLL of the labels, summed for each of some groups of targets. Result: each group's sums (fp64, (groups, 2)),
    the loss and how many targets are predicted."""

    def __init__(self, rows: PackedRows, groups: Sequence[int], shard: VocabularyShard | None) -> None:
        """`groups`: how many targets each has, in their order."""
        self._groups, self._shard, self._found_K2 = groups, shard, _unfilled(rows)

    def add(self, logits: Tensor, chunk: TargetChunk) -> None:
        negative_log_likelihood_(logits, chunk.labels_K, chunk.of(self._found_K2), self._shard)

    def finish(self, gradient_1TD: Tensor | None) -> Tensor:
        return torch.stack([own_K2.sum(0) for own_K2 in torch.split(self._found_K2, list(self._groups))])


class Divergence:
    """The divergence from a teacher, of one job. Result: its sums (fp64, (1, 2)), as of `Likelihood`."""

    def __init__(
        self, rows: PackedRows, teacher: Callable[[TargetChunk], Tensor], shard: VocabularyShard | None
    ) -> None:
        """`teacher`: its logits of a chunk, without gradients."""
        self._teacher, self._shard, self._found_K2 = teacher, shard, _unfilled(rows)

    def add(self, logits: Tensor, chunk: TargetChunk) -> None:
        divergence_(logits, self._teacher(chunk), chunk.labels_K, chunk.of(self._found_K2), self._shard)

    def finish(self, gradient_1TD: Tensor | None) -> Tensor:
        return self._found_K2.sum(0, keepdim=True)


class Preference(Likelihood):
    """The DPO loss of one job's pairs. Result: its sums (fp64, (1, 5)): the loss, how many targets are predicted, and
    those of the other three that `losses.formulas.preference` returns.

    A token's logits depend on its own hidden state alone. So the gradient of the loss in that state is the NLL's, times
    the gradient of the loss in the NLL of the token's sequence: the head is computed once, though the latter is known
    only after all chunks.
    """

    def __init__(self, rows: PackedRows, reference_Q2: Tensor, beta: float, shard: VocabularyShard | None) -> None:
        """`reference_Q2`: the result of `Likelihood` of the sequences with the reference."""
        super().__init__(rows, rows.sequence_targets, shard)
        self._sequences_T, self._reference_Q2, self._beta = rows.sequences_T, reference_Q2, beta

    def finish(self, gradient_1TD: Tensor | None) -> Tensor:
        found_Q2 = super().finish(None)
        losses_P2, reference_P2 = found_Q2[:, 0].view(-1, 2), self._reference_Q2[:, 0].view(-1, 2)
        sums, slopes_P2 = preference(losses_P2, reference_P2, self._beta)
        if gradient_1TD is not None:
            assert self._sequences_T is not None, "expected rows of pairs"
            gradient_1TD *= slopes_P2.view(-1).float()[self._sequences_T, None]
        return torch.cat((sums[:1], found_Q2[:, 1].sum(0, keepdim=True), sums[1:]))[None]


def _unfilled(rows: PackedRows) -> Tensor:
    """(fp64, (K, 2)) for each target's loss and whether it is predicted."""
    return torch.empty(rows.targets, 2, dtype=torch.float64, device=rows.keep_K.device)
