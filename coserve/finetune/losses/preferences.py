"""Preference losses: of pairs (DPO and its relatives, ORPO, SimPO), and of answers with a label (KTO). They are
functions of whole answers' likelihoods.

Letters: Q sequences, P pairs. The columns of (P, 2) are the chosen and the rejected answer.
"""

from __future__ import annotations

import math
from typing import assert_never

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from coserve.core.training.settings import DpoLoss, KtoLoss, OrpoLoss, PairLoss, SimpoLoss

EXO_SMOOTHING = 1e-3
"""Label smoothing of `exo_pair` where none is given, as in TRL: the formula has its logarithm."""
LARGEST_MEAN = -(2.0**-24)
"""Mean log-probability of an answer above which ORPO's odds are constant: that of the largest fp32 probability below 1.
At 0 the odds are infinite, and their gradient is NaN."""


def pair_loss(nll_P2: Tensor, reference_nll_P2: Tensor, targets_P2: Tensor, loss: PairLoss) -> tuple[Tensor, Tensor]:
    """Return a loss of pairs and its gradient. Inputs (fp64): each answer's negative log-likelihood, summed over its
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
