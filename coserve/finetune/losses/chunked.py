"""The loss of a micro-batch and its count of correct predictions, computed from target logits chunk by chunk: the
logits of all targets are never in memory at once.

Letters: T packed tokens, D hidden, V vocabulary, K targets, C candidates of a target, J jobs, Q sequences, P pairs. The
columns of (P, 2) are the chosen and the rejected answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, assert_never

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from coserve.core.training.settings import DpoLoss, OrpoLoss, PairLoss, SimpoLoss
from coserve.finetune.losses.formulas import divergence_, negative_log_likelihood_, soft_cross_entropy_
from coserve.finetune.losses.loss import TokenLoss
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
    """Loss of one job's pairs. Result: fp64 (1, 5): the loss, how many targets are predicted correctly, and the three
    other sums of `preference_loss`.

    A token's logits depend only on its own hidden state. So the gradient of the loss with respect to that state is the
    NLL's gradient times the derivative of the loss with respect to the NLL of the token's sequence. The head is
    therefore computed once, although that derivative is known only after all chunks.
    """

    def __init__(
        self, rows: PackedRows, reference_Q2: Tensor | None, loss: PairLoss, shard: VocabularyShard | None
    ) -> None:
        """`reference_Q2`: the sequences' `Likelihood` result under the reference model; None for a loss without."""
        super().__init__(rows, rows.sequence_targets, shard)
        self._sequences_T, self._reference_Q2, self._loss = rows.sequences_T, reference_Q2, loss

    def finish(self, gradient_1TD: Tensor | None) -> Tensor:
        found_Q2 = super().finish(None)
        reference_Q2 = torch.zeros_like(found_Q2) if self._reference_Q2 is None else self._reference_Q2
        nll_P2, reference_nll_P2 = found_Q2[:, 0].view(-1, 2), reference_Q2[:, 0].view(-1, 2)
        targets_P2 = to_device(torch.tensor(self._groups, dtype=torch.float64), nll_P2.device).view(-1, 2)
        sums, slopes_P2 = preference_loss(nll_P2, reference_nll_P2, targets_P2, self._loss)
        if gradient_1TD is not None:
            assert self._sequences_T is not None, "expected rows of pairs"
            gradient_1TD *= slopes_P2.view(-1).float()[self._sequences_T, None]
        return torch.cat((sums[:1], found_Q2[:, 1].sum(0, keepdim=True), sums[1:]))[None]


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


EXO_SMOOTHING = 1e-3
"""Label smoothing of `exo_pair` where none is given, as in TRL: the formula has its logarithm."""
LARGEST_MEAN = -(2.0**-24)
"""Mean log-probability of an answer above which ORPO's odds are constant: that of the largest fp32 probability below 1.
At 0 the odds are infinite, and their gradient is NaN."""


def preference_loss(
    nll_P2: Tensor, reference_nll_P2: Tensor, targets_P2: Tensor, loss: PairLoss
) -> tuple[Tensor, Tensor]:
    """Return a preference loss and its gradient. Inputs (fp64): each answer's negative log-likelihood, summed over its
    targets, under the model and under the reference (read by a `DpoLoss` alone), and its number of targets.

    Returns sums over the pairs (fp64, (4)): the loss, the rewards of the chosen and of the rejected answers, and how
    many pairs have the larger reward for the chosen one; and the gradient of the first with respect to `nll_P2` (P, 2).
    """
    with torch.enable_grad():
        logp_P2 = (-nll_P2).requires_grad_()
        mean_P2 = logp_P2 / targets_P2
        match loss:
            case DpoLoss():
                ratios_P2 = logp_P2 + reference_nll_P2
                rewards_P2 = loss.beta * ratios_P2
                loss_P = _dpo(loss, ratios_P2, reference_nll_P2, targets_P2) - loss.sft_weight * mean_P2[:, 0]
            case OrpoLoss():
                rewards_P2 = loss.beta * mean_P2
                below_one_P2 = mean_P2.clamp(max=LARGEST_MEAN)
                log_odds_P2 = below_one_P2 - torch.log1p(-below_one_P2.exp())
                loss_P = -mean_P2[:, 0] - loss.beta * logsigmoid(_margin(log_odds_P2))
            case SimpoLoss():
                rewards_P2 = loss.beta * mean_P2
                loss_P = -logsigmoid(_margin(rewards_P2) - loss.gamma) - loss.sft_weight * mean_P2[:, 0]
            case _:
                assert_never(loss)
        total = loss_P.sum()
    rewards_P2 = rewards_P2.detach()
    wins = (_margin(rewards_P2) > 0).sum().double()
    sums = torch.stack((total.detach(), *rewards_P2.sum(0).unbind(), wins))
    return sums, -torch.autograd.grad(total, logp_P2)[0]


def _margin(x_P2: Tensor) -> Tensor:
    return x_P2[:, 0] - x_P2[:, 1]


def _dpo(loss: DpoLoss, ratios_P2: Tensor, reference_nll_P2: Tensor, targets_P2: Tensor) -> Tensor:
    """Return the loss of each pair (P). `ratios_P2`: log(pi / pi_ref) of each answer. Names and formulas are those of
    TRL's `DPOConfig.loss_type`, which names the papers."""
    beta, smoothing = loss.beta, loss.label_smoothing
    rewards_P2 = beta * ratios_P2
    chosen_P, rejected_P = rewards_P2.unbind(1)
    margin_P = chosen_P - rejected_P
    match loss.loss_type:
        case "sigmoid" | "aot" | "aot_unpaired":
            if loss.loss_type == "aot":
                own_P, reference_P = _margin(ratios_P2 - reference_nll_P2), _margin(-reference_nll_P2)
                margin_P = beta * (own_P.sort().values - reference_P.sort().values)
            elif loss.loss_type == "aot_unpaired":
                margin_P = chosen_P.sort().values - rejected_P.sort().values
            return -(1 - smoothing) * logsigmoid(margin_P) - smoothing * logsigmoid(-margin_P)
        case "robust":
            unbiased_P = (1 - smoothing) * logsigmoid(margin_P) - smoothing * logsigmoid(-margin_P)
            return -unbiased_P / (1 - 2 * smoothing)
        case "hinge":
            return torch.relu(1 - margin_P)
        case "ipo":
            return (_margin(ratios_P2 / targets_P2) - 1 / (2 * beta)).square()
        case "sigmoid_norm":
            return -logsigmoid(_margin(rewards_P2 / targets_P2))
        case "exo_pair":
            flipped = smoothing or EXO_SMOOTHING
            won_P, lost_P = logsigmoid(margin_P), logsigmoid(-margin_P)
            return won_P.exp() * (won_P - math.log1p(-flipped)) + lost_P.exp() * (lost_P - math.log(flipped))
        case "nca_pair":
            return -logsigmoid(chosen_P) - 0.5 * (logsigmoid(-chosen_P) + logsigmoid(-rejected_P))
        case "bco_pair":
            return -logsigmoid(chosen_P) - logsigmoid(-rejected_P)
        case "sppo_hard":
            return (ratios_P2[:, 0] - 0.5 / beta).square() + (ratios_P2[:, 1] + 0.5 / beta).square()
        case "apo_zero":
            return torch.sigmoid(-chosen_P) + torch.sigmoid(rejected_P)
        case "discopop":
            mixed_P = torch.sigmoid(margin_P / loss.discopop_tau)
            return -(1 - mixed_P) * logsigmoid(margin_P) + mixed_P * torch.exp(-margin_P)
        case "apo_down":
            return torch.sigmoid(chosen_P) + torch.sigmoid(-margin_P)
        case _:
            assert_never(loss.loss_type)
