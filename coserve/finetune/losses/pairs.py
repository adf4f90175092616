"""Losses of pairs of a chosen and a rejected answer, as functions of the answers' log-probabilities.

Letters: P pairs; the columns of (P, 2) are the chosen and the rejected answer.
"""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from coserve.core.training.settings import DpoLoss, OrpoLoss, PairLoss, SimpoLoss

LEAST_SMOOTHING = 1e-3
"""The smoothing of `exo_pair` where none is given, as in TRL: the formula has its logarithm."""
LARGEST_MEAN = -(2.0**-24)
"""Mean log-probability from which on ORPO takes odds as constant: a token's likelihood next to 1 in fp32. At 0 odds are
infinite, and their gradient is no number."""


def preference(losses_P2: Tensor, reference_P2: Tensor, targets_P2: Tensor, loss: PairLoss) -> tuple[Tensor, Tensor]:
    """Return the loss of pairs. Inputs (fp64): the answers' negative log-likelihoods under the model, under the
    reference (read by a `DpoLoss` alone), and their numbers of targets.

    Returns sums over the pairs (fp64, (4)): the loss, the rewards of the chosen and of the rejected answers, and how
    many margins are above 0; and the gradient of the loss with respect to `losses_P2` (P, 2).
    """
    with torch.enable_grad():
        p_P2 = (-losses_P2).requires_grad_()
        mean_P2 = p_P2 / targets_P2
        match loss:
            case DpoLoss():
                ratios_P2 = p_P2 + reference_P2
                rewards_P2 = loss.beta * ratios_P2
                loss_P = _dpo(loss, ratios_P2, targets_P2) - loss.sft_weight * mean_P2[:, 0]
            case OrpoLoss():
                rewards_P2 = loss.beta * mean_P2
                unsure_P2 = mean_P2.clamp(max=LARGEST_MEAN)
                log_odds_P2 = unsure_P2 - torch.log1p(-unsure_P2.exp())
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
    return sums, -torch.autograd.grad(total, p_P2)[0]


def _margin(x_P2: Tensor) -> Tensor:
    return x_P2[:, 0] - x_P2[:, 1]


def _dpo(loss: DpoLoss, ratios_P2: Tensor, targets_P2: Tensor) -> Tensor:
    """Return the loss of each pair (P). `ratios_P2`: log-probabilities, less the reference's. Names and formulas are
    those of TRL's `DPOConfig.loss_type`, which names the papers."""
    beta, smoothing = loss.beta, loss.label_smoothing
    rewards_P2 = beta * ratios_P2
    chosen_P, rejected_P = rewards_P2.unbind(1)
    margin_P = chosen_P - rejected_P
    match loss.loss_type:
        case "sigmoid":
            return -(1 - smoothing) * logsigmoid(margin_P) - smoothing * logsigmoid(-margin_P)
        case "robust":
            noisy_P = (1 - smoothing) * logsigmoid(margin_P) - smoothing * logsigmoid(-margin_P)
            return -noisy_P / (1 - 2 * smoothing)
        case "hinge":
            return torch.relu(1 - margin_P)
        case "ipo":
            return (_margin(ratios_P2 / targets_P2) - 1 / (2 * beta)).square()
        case "sigmoid_norm":
            return -logsigmoid(_margin(rewards_P2 / targets_P2))
        case "exo_pair":
            share = torch.tensor(smoothing or LEAST_SMOOTHING, dtype=margin_P.dtype)
            won_P, lost_P = logsigmoid(margin_P), logsigmoid(-margin_P)
            return won_P.exp() * (won_P - torch.log1p(-share)) + lost_P.exp() * (lost_P - share.log())
        case "nca_pair":
            return -logsigmoid(chosen_P) - 0.5 * (logsigmoid(-chosen_P) + logsigmoid(-rejected_P))
        case "bco_pair":
            return -logsigmoid(chosen_P) - logsigmoid(-rejected_P)
        case "sppo_hard":
            return (ratios_P2[:, 0] - 0.5 / beta).square() + (ratios_P2[:, 1] + 0.5 / beta).square()
        case "apo_zero":
            return torch.sigmoid(-chosen_P) + torch.sigmoid(rejected_P)
        case "apo_down":
            return torch.sigmoid(chosen_P) + torch.sigmoid(-margin_P)
        case _:
            assert_never(loss.loss_type)
