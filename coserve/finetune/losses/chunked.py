"""The loss of a micro-batch and its count of correct predictions, computed from target logits chunk by chunk: the
logits of all targets are never in memory at once.

Letters: T packed tokens, D hidden, V vocabulary, K targets, C candidates of a target, J jobs, Q sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from coserve.core.training.settings import KtoLoss, PreferenceLoss
from coserve.finetune.losses.formulas import divergence_, negative_log_likelihood_, soft_cross_entropy_
from coserve.finetune.losses.loss import TokenLoss
from coserve.finetune.losses.preferences import labelled_loss, pair_loss
from coserve.finetune.packed_rows import PackedRows
from coserve.kernels.gpu.device import to_device
from coserve.model.parallel.vocabulary import VocabularyShard


@dataclass(frozen=True)
class TargetChunk:
    """Targets whose logits are computed at once."""

    start: int
    """Index of the chunk's first target among the micro-batch's."""
    keep_K: Tensor  # noqa: N815
    labels_K: Tensor  # noqa: N815

    def of(self, x_K: Tensor) -> Tensor:
        """Slice a tensor (K, ...) over all targets to this chunk."""
        return x_K[self.start : self.start + self.labels_K.shape[0]]


def target_chunks(rows: PackedRows, size: int) -> list[TargetChunk]:
    """Split the targets into chunks of at most `size`."""
    starts = range(0, rows.targets, size)
    keeps, labels = torch.split(rows.keep_K, size), torch.split(rows.labels_K, size)
    return [TargetChunk(*one) for one in zip(starts, keeps, labels, strict=False)]  # no targets: one empty chunk


class ChunkedLoss(Protocol):
    """A micro-batch's loss, accumulated chunk by chunk."""

    def add(self, logits: Tensor, chunk: TargetChunk) -> None:
        """Add the next chunk's logits (K, V), or this rank's vocabulary shard of them, without gradients. In place,
        they become the gradient of the summed loss, up to the factors of `finish`."""
        ...

    def finish(self, gradient_1TD: Tensor | None) -> Tensor:
        """Return the result after the last chunk. `gradient_1TD`: summed gradient with respect to the last hidden
        states, turned in place into the gradient of the loss; None in an evaluation."""
        ...


class Likelihood:
    """NLL of the labels, summed over each group of targets. Result: fp64 (groups, 2): the loss, and how many targets
    are predicted correctly."""

    def __init__(self, rows: PackedRows, groups: Sequence[int], shard: VocabularyShard | None) -> None:
        """`groups`: number of targets in each group, in order."""
        self._groups, self._shard, self._found_K2 = groups, shard, _unfilled(rows)

    def add(self, logits: Tensor, chunk: TargetChunk) -> None:
        negative_log_likelihood_(logits, chunk.labels_K, chunk.of(self._found_K2), self._shard)

    def finish(self, gradient_1TD: Tensor | None) -> Tensor:
        return torch.stack([own_K2.sum(0) for own_K2 in torch.split(self._found_K2, list(self._groups))])


class Divergence:
    """Divergence of one job's distributions from a teacher's. Result: fp64 (1, 2), as in `Likelihood`."""

    def __init__(
        self, rows: PackedRows, teacher: Callable[[TargetChunk], Tensor], shard: VocabularyShard | None
    ) -> None:
        """`teacher`: returns the teacher's logits of a chunk, without gradients."""
        self._teacher, self._shard, self._found_K2 = teacher, shard, _unfilled(rows)

    def add(self, logits: Tensor, chunk: TargetChunk) -> None:
        divergence_(logits, self._teacher(chunk), chunk.labels_K, chunk.of(self._found_K2), self._shard)

    def finish(self, gradient_1TD: Tensor | None) -> Tensor:
        return self._found_K2.sum(0, keepdim=True)


class Preference(Likelihood):
    """Loss of one job's sequences that depends on whole answers: of pairs, or of answers with a label (KTO). Result:
    fp64 (1, 5 or 6): the loss, how many targets are predicted correctly (without mismatched answers), and the other
    sums of `pair_loss` or `labelled_loss`.

    A token's logits depend only on its own hidden state. So the gradient of the loss with respect to that state is the
    NLL's gradient times the derivative of the loss with respect to the NLL of the token's sequence. The head is
    therefore computed once, although that derivative is known only after all chunks.
    """

    def __init__(
        self, rows: PackedRows, reference_Q2: Tensor | None, loss: PreferenceLoss, shard: VocabularyShard | None
    ) -> None:
        """`reference_Q2`: the sequences' `Likelihood` result under the reference model; None for a loss without."""
        super().__init__(rows, rows.sequence_targets, shard)
        self._rows, self._reference_Q2, self._loss = rows, reference_Q2, loss

    def finish(self, gradient_1TD: Tensor | None) -> Tensor:
        nll_Q, correct_Q = super().finish(None).unbind(1)
        reference_Q = torch.zeros_like(nll_Q) if self._reference_Q2 is None else self._reference_Q2[:, 0]
        if isinstance(self._loss, KtoLoss):
            signs_Q = to_device(torch.tensor(self._rows.signs, dtype=torch.float64), nll_Q.device)
            sums, slopes_Q = labelled_loss(nll_Q, reference_Q, signs_Q, self._loss)
            correct_Q = correct_Q * signs_Q.abs()
        else:
            targets_Q = to_device(torch.tensor(self._groups, dtype=torch.float64), nll_Q.device)
            nll_P2, reference_P2, targets_P2 = (each_Q.view(-1, 2) for each_Q in (nll_Q, reference_Q, targets_Q))
            sums, slopes_Q = pair_loss(nll_P2, reference_P2, targets_P2, self._loss)
        if gradient_1TD is not None:
            assert self._rows.sequences_T is not None, "expected rows of pairs, or with a label"
            gradient_1TD *= slopes_Q.view(-1).float()[self._rows.sequences_T, None]
        return torch.cat((sums[:1], correct_Q.sum(0, keepdim=True), sums[1:]))[None]


class TokenFunction(Likelihood):
    """A loss that is a function of each target's log-probability. Result: fp64 (1, 2 + K): as in `Likelihood`, then the
    log-probabilities.

    As in `Preference`, the derivative with respect to a target's log-probability scales the gradient of its state.
    """

    def __init__(self, rows: PackedRows, loss: TokenLoss, shard: VocabularyShard | None) -> None:
        super().__init__(rows, rows.job_targets, shard)
        self._rows, self._loss = rows, loss

    def finish(self, gradient_1TD: Tensor | None) -> Tensor:
        with torch.enable_grad():
            p_K = (-self._found_K2[:, :-1].view_as(self._rows.labels_K)).requires_grad_()
            loss = self._loss(p_K, self._rows.values).sum()
        if gradient_1TD is not None:
            self._scale(gradient_1TD, torch.autograd.grad(loss, p_K)[0])
        return torch.cat((loss.detach()[None], self._found_K2[:, -1].sum(0, keepdim=True), p_K.detach().view(-1)))[None]

    def _scale(self, gradient_1TD: Tensor, slopes_K: Tensor) -> None:
        """Turn the gradient of the summed NLL into that of the loss. `slopes_K`: derivatives of the loss."""
        factors_T = gradient_1TD.new_zeros(gradient_1TD.shape[1], dtype=torch.float32)
        factors_T[self._rows.keep_K] = -slopes_K.float()
        gradient_1TD *= factors_T[:, None]


class SoftTargets(TokenFunction):
    """`TokenFunction` for cross-entropy with several candidates of each target. Result: fp64 (1, 2 + K * C)."""

    def __init__(self, rows: PackedRows, loss: TokenLoss, shard: VocabularyShard | None) -> None:
        super().__init__(rows, loss, shard)
        candidates = rows.labels_K.shape[1]
        self._found_K2 = torch.empty(rows.targets, candidates + 1, dtype=torch.float64, device=rows.keep_K.device)

    def add(self, logits: Tensor, chunk: TargetChunk) -> None:
        weights_KC = self._rows.values.weights_K
        assert weights_KC is not None, "expected a checked batch"
        soft_cross_entropy_(logits, chunk.labels_K, chunk.of(weights_KC), chunk.of(self._found_K2), self._shard)

    def _scale(self, gradient_1TD: Tensor, slopes_K: Tensor) -> None:
        """Nothing: the gradients of the logits were weighted already."""


def _unfilled(rows: PackedRows) -> Tensor:
    """fp64 (K, 2): buffer for each target's loss and whether it is predicted correctly."""
    return torch.empty(rows.targets, 2, dtype=torch.float64, device=rows.keep_K.device)
