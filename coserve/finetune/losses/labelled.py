"""The losses of answers with a label (KTO), which belong to no pairs.

Letters: T packed tokens, D hidden, Q sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coserve.core.training.settings import KtoLoss
from coserve.finetune.losses.chunked import Likelihood
from coserve.finetune.packed_rows import PackedRows
from coserve.kernels.gpu.device import to_device
from coserve.model.parallel.vocabulary import VocabularyShard


class Labelled(Likelihood):
    """Loss of one job's answers with a label. Result: fp64 (1, 6): the loss, how many targets of these answers are
    predicted correctly, and the four other sums of `labelled_loss`. The gradient is made as in `chunked.Preference`."""

    def __init__(self, rows: PackedRows, reference_Q2: Tensor, loss: KtoLoss, shard: VocabularyShard | None) -> None:
        """`reference_Q2`: the sequences' `Likelihood` result under the reference model."""
        super().__init__(rows, rows.sequence_targets, shard)
        self._rows, self._reference_Q2, self._loss = rows, reference_Q2, loss

    def finish(self, gradient_1TD: Tensor | None) -> Tensor:
        found_Q2 = super().finish(None)
        signs_Q = to_device(torch.tensor(self._rows.signs, dtype=torch.float64), found_Q2.device)
        sums, slopes_Q = labelled_loss(found_Q2[:, 0], self._reference_Q2[:, 0], signs_Q, self._loss)
        if gradient_1TD is not None:
            assert self._rows.sequences_T is not None, "expected rows with a label"
            gradient_1TD *= slopes_Q.float()[self._rows.sequences_T, None]
        correct = (found_Q2[:, 1] * signs_Q.abs()).sum(0, keepdim=True)
        return torch.cat((sums[:1], correct, sums[1:]))[None]


def labelled_loss(nll_Q: Tensor, reference_nll_Q: Tensor, signs_Q: Tensor, loss: KtoLoss) -> tuple[Tensor, Tensor]:
    """Return KTO's loss and its gradient, with TRL's names and formulas. Inputs (fp64): each sequence's negative
    log-likelihood, summed over its targets, under the model and under the reference, and its `Example.sign`.

    Returns sums (fp64, (5)): the loss, the rewards of the desirable and of the other answers, how many rewards have the
    answer's sign, and how many answers are desirable; and the gradient of the first with respect to `nll_Q`.
    """
    desirable_Q, mismatched_Q = (signs_Q > 0).double(), (signs_Q == 0).double()
    undesirable_Q = (signs_Q < 0).double()
    with torch.enable_grad():
        logp_Q = (-nll_Q).requires_grad_()
        ratios_Q = logp_Q + reference_nll_Q
        # the mean log-ratio of mismatched answers estimates the KL divergence; without any (apo_zero_unpaired) it is 0
        kl = ((ratios_Q * mismatched_Q).sum() / mismatched_Q.sum().clamp(min=1)).detach().clamp(min=0)
        weights_Q = loss.desirable_weight * desirable_Q + loss.undesirable_weight * undesirable_Q
        total = (weights_Q * torch.sigmoid(-signs_Q * loss.beta * (ratios_Q - kl))).sum()
    rewards_Q = loss.beta * ratios_Q.detach()
    wins = (rewards_Q * signs_Q > 0).double()
    sums = [total.detach(), *((rewards_Q * each).sum() for each in (desirable_Q, undesirable_Q)), wins.sum()]
    return torch.stack((*sums, desirable_Q.sum())), -torch.autograd.grad(total, logp_Q)[0]
