"""Losses of targets' log-probabilities, on rows from outside: the same values and gradients as plain autograd's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from coserve.core.errors import InvalidRequest
from coserve.core.types import LoraSettings
from coserve.data.corpus.batch import Batch, Example
from coserve.finetune.losses.loss import Cispo, CrossEntropy, Dro, Gspo, ImportanceSampling, Loss, Ppo, TokenLoss
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.packed_rows import PackedRows, pack_jobs
from coserve.kernels.attention.packed import PackedAttention
from coserve.model.base import Base
from coserve.model.lora import LoraWeights
from tests.support.finetuning import CPU, gradient_sums, started
from tests.support.lora_backends import lora_of
from tests.support.tiny_models import VOCAB

Formula = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""The summed loss from p, weights, q and advantages."""


def ppo(p: Tensor, w: Tensor, q: Tensor, a: Tensor) -> Tensor:
    r = (p - q).exp()
    return -torch.stack((r * a, r.clamp(0.8, 1.2) * a)).amin(0).sum()


def cispo(p: Tensor, w: Tensor, q: Tensor, a: Tensor) -> Tensor:
    r = (p - q).exp()
    return -(torch.where(r > 1.05, 1.05, r).detach() * p * a).sum()


TARGETS = (3, 18, 1)
"""Of each row of `batch_of`."""


def gspo(p: Tensor, w: Tensor, q: Tensor, a: Tensor) -> Tensor:
    """GSPO-token, one target after another."""
    loss = p.new_zeros(())
    for own_p, own_q, own_a, marked in zip(*(x.split(TARGETS) for x in (p, q, a)), map(mask, TARGETS), strict=True):
        s = (own_p - own_q)[torch.tensor(marked) != 0].mean().exp().detach()
        for own, advantage in zip(own_p, own_a, strict=True):
            s_t = s * own.exp() / own.exp().detach()
            loss = loss - torch.minimum(s_t * advantage, s_t.clamp(0.9, 1.5) * advantage)
    return loss


def whole(p: Tensor, w: Tensor, q: Tensor, a: Tensor) -> Tensor:
    """GSPO with one advantage for each sequence, its first, times its length."""
    return -sum(
        len(own_p) * (own_p - own_q).mean().exp() * own_a[0]
        for own_p, own_q, own_a in zip(*(x.split(TARGETS) for x in (p, q, a)), strict=True)
    )  # type: ignore[return-value]


LOSSES: dict[str, tuple[TokenLoss, Formula]] = {
    "cross_entropy": (CrossEntropy(), lambda p, w, q, a: -(w * p).sum()),
    "importance_sampling": (ImportanceSampling(), lambda p, w, q, a: -((p - q).exp() * a).sum()),
    "ppo": (Ppo(), ppo),
    "cispo": (Cispo(high=1.05), cispo),
    "gspo": (Gspo(low=0.9, high=1.5), gspo),
    "dro": (Dro(beta=0.1), lambda p, w, q, a: -(p * a - 0.05 * (p - q) ** 2).sum()),
}


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def mask(targets: int) -> np.ndarray:
    """All but the second of three targets."""
    return (np.arange(targets) % 3 != 1).astype(np.float32)


def example(seed: int, tokens: int, after: tuple[int, ...], candidates: int | None = None) -> Example:
    random = np.random.default_rng(seed)
    shape = (len(after),) if candidates is None else (len(after), candidates)
    return Example(
        random.integers(3, VOCAB, tokens).astype(np.int32),
        np.array(after, np.int64),
        random.integers(3, VOCAB, shape),
        weights_K=drawn(*shape, seed=seed),
        sampled_K=drawn(len(after), seed=seed + 1) - 6,
        advantages_K=drawn(len(after), seed=seed + 2),
        ratio_mask_K=mask(len(after)),
    )


def batch_of(candidates: int | None = None) -> Batch:
    rows = ((1, 9, (0, 3, 8)), (2, 24, tuple(range(5, 23))), (3, 1, (0,)))
    return Batch(tuple(example(*row, candidates) for row in rows))


def log_probs(base: Base, rows: PackedRows, weights: LoraWeights) -> Tensor:
    """Of the labels, as plain autograd computes them, fp64."""
    lora = lora_of(weights, rows.tokens)
    attention = PackedAttention(rows.bounds)
    logits = base.forward(rows.tokens_T, rows.positions_T, attention, lora=lora, keep=rows.keep_K)
    return logits.double().log_softmax(-1).gather(1, rows.labels_K.view(rows.targets, -1)).view_as(rows.labels_K)


class Found:
    """What one micro-batch gives: loss, log-probabilities, gradients, and the same from an evaluation."""

    def __init__(self, base: Base, batch: Batch, loss: TokenLoss) -> None:
        Loss(tokens=loss).check(batch, VOCAB)
        self.rows, self.optimizer = pack_jobs([batch], CPU), started(base, LoraSettings(r=4, alpha=8))
        runner = MicroBatchRunner(base, recompute=False, logits_bytes=1)  # several chunks
        lora = lora_of(self.optimizer.weights(), self.rows.tokens)
        optimizer = self.optimizer
        steps = runner.forward_backward(self.rows, lora, optimizer.trainable, optimizer.grads, Loss(tokens=loss))
        (found,) = run_to_end(steps)
        (evaluated,) = run_to_end(runner.evaluate(self.rows, lora, Loss(tokens=loss)))
        assert torch.equal(found, evaluated)
        self.loss, self.p = float(found[0]), found[2:].view_as(self.rows.labels_K)
        self.gradients = gradient_sums(optimizer)


def assert_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6 * largest, msg=name)


def autograd(base: Base, optimizer: AdapterOptimizer, rows: PackedRows, formula: Formula) -> tuple[float, dict]:
    sites = {
        site: replace(
            pair,
            a_RD=pair.a_RD.detach().clone().requires_grad_(),
            b_OR=pair.b_OR.detach().clone().requires_grad_(),
            main_grads=None,
        )
        for site, pair in optimizer.weights().sites.items()
    }
    values = rows.values
    p = log_probs(base, rows, LoraWeights(LoraSettings(r=4, alpha=8), sites))
    loss = formula(p, values.weights_K, values.sampled_K, values.advantages_K)
    loss.backward()
    by_name = {f"{site}.{part}": t.grad for site, p in sites.items() for part, t in (("a", p.a_RD), ("b", p.b_OR))}
    return float(loss.detach()), by_name


@pytest.mark.parametrize(
    ("name", "candidates"), [*((name, None) for name in LOSSES), ("cross_entropy", 1), ("cross_entropy", 5)]
)
def test_losses_and_gradients_are_those_of_autograd(base: Base, name: str, candidates: int | None) -> None:
    loss, formula = LOSSES[name]
    found = Found(base, batch_of(candidates), loss)
    assert found.rows.targets > 16, "several chunks of the smallest size"
    expected, gradients = autograd(base, found.optimizer, found.rows, formula)
    assert found.loss == pytest.approx(expected, rel=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(
            found.p, log_probs(base, found.rows, found.optimizer.weights()), rtol=1e-5, atol=1e-5
        )
    assert_gradients(found.gradients, gradients)


def test_on_the_policy_all_gradients_are_those_of_weighted_log_probabilities(base: Base) -> None:
    """And any other loss L is cross-entropy with weights of -dL/dp."""
    batch = batch_of()
    p = Found(base, batch, CrossEntropy()).p.float().split([len(one.after_K) for one in batch.examples])
    examples = [
        replace(one, sampled_K=own.numpy(), weights_K=one.advantages_K)
        for one, own in zip(batch.examples, p, strict=True)
    ]
    expected = Found(base, Batch(tuple(examples)), CrossEntropy()).gradients
    for loss in (ImportanceSampling(), Ppo(), Cispo(), Dro(), Gspo()):
        assert_gradients(Found(base, Batch(tuple(examples)), loss).gradients, expected)
    squares = [replace(one, weights_K=-2 * own.numpy()) for one, own in zip(batch.examples, p, strict=True)]
    custom = Found(base, Batch(tuple(squares)), CrossEntropy())
    _, gradients = autograd(base, custom.optimizer, custom.rows, lambda p, *_: (p**2).sum())
    assert_gradients(custom.gradients, gradients)


def test_tokens_of_one_advantage_have_the_gradient_of_the_sequences_ratio(base: Base) -> None:
    """The identity of GSPO-token and GSPO, arXiv 2507.18071, section 4.3."""
    rows = [
        replace(
            one, advantages_K=np.full_like(one.sampled_K, one.advantages_K[0]), ratio_mask_K=np.ones_like(one.sampled_K)
        )
        for one in batch_of().examples
    ]
    found = Found(base, Batch(tuple(rows)), Gspo(low=0.0, high=100.0))
    expected, gradients = autograd(base, found.optimizer, found.rows, whole)
    assert found.loss == pytest.approx(expected, rel=1e-5)
    assert_gradients(found.gradients, gradients)


ONE = example(1, 6, (0, 2))


@pytest.mark.parametrize(
    ("wrong", "loss", "message"),
    [
        (replace(ONE, weights_K=None), CrossEntropy(), "expected weights of each target"),
        (replace(ONE, sampled_K=None, advantages_K=None), Ppo(), "expected sampled and advantages of each target"),
        (replace(ONE, ratio_mask_K=None), Gspo(), "expected ratio_mask of each target"),
        (replace(ONE, ratio_mask_K=np.zeros(2, np.float32)), Gspo(), "got only 0"),
        (replace(ONE, advantages_K=drawn(3)), Ppo(), r"expected finite advantages of shape \(2,\), got \(3,\)"),
        (replace(ONE, weights_K=drawn(2) * np.nan), CrossEntropy(), "expected finite weights"),
        (replace(ONE, after_K=np.array([2, 2])), CrossEntropy(), "ascending order"),
        (replace(ONE, after_K=np.array([2, 6])), CrossEntropy(), "some of the 6 tokens"),
        (replace(ONE, labels_K=np.array([3, VOCAB])), CrossEntropy(), f"expected labels from 0 to {VOCAB - 1}"),
        (example(1, 6, (0, 2), 3), Cispo(), "only cross-entropy takes several"),
    ],
)
def test_rows_that_do_not_fit_are_refused(wrong: Example, loss: TokenLoss, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Loss(tokens=loss).check(Batch((wrong,)), VOCAB)
