"""Losses whose logits become gradients, against autograd in double precision: the kernels (in Triton's interpreter
without a GPU, at a few logits a block) and the same in torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from coserve.finetune.losses import formulas
from coserve.kernels.losses import launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Of gradients, by dtype: those of one label are between -1 and 1, and rounded once."""
SMALL = {"block": 32, "warps": 4}
LIKELIHOODS = {
    "kernel": partial(launch.negative_log_likelihood_, **SMALL),
    "torch": lambda *given: formulas.negative_log_likelihood_(*given, None),
}
DIVERGENCES = {
    "kernel": partial(launch.divergence_, **SMALL),
    "torch": lambda *given: formulas.divergence_(*given, None),
}
SOFT = {
    "kernel": partial(launch.soft_cross_entropy_, **SMALL),
    "torch": lambda *given: formulas.soft_cross_entropy_(*given, None),
}
by = pytest.mark.parametrize("by", ["kernel", "torch"])


def random_logits(rows: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """In a larger tensor: rows lie apart."""
    drawn = torch.randn(rows, vocab + 3, generator=torch.Generator().manual_seed(seed)) * 4
    return drawn.to(DEVICE, dtype)[:, :vocab]


def labels_of(rows: int, vocab: int) -> Tensor:
    return torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def check(
    loss_: Callable[..., None], losses_of: Callable[[Tensor], Tensor], logits: Tensor, labels: Tensor, *rest: Tensor
) -> None:
    """`losses_of`: of each row, from logits in double precision."""
    exact = logits.detach().double().requires_grad_()
    losses = losses_of(exact)
    (gradient,) = torch.autograd.grad(losses.sum(), exact)
    predicted = exact.gather(1, labels[:, None])[:, 0] == exact.amax(1)
    found = torch.full((len(labels), 2), math.nan, dtype=torch.float64, device=DEVICE)
    loss_(logits, *rest, labels, found)
    torch.testing.assert_close(found[:, 0], losses.detach(), rtol=1e-5, atol=1e-5)
    assert found[:, 1].tolist() == predicted.double().tolist()
    torch.testing.assert_close(logits.double(), gradient, rtol=TOLERANCES[logits.dtype], atol=TOLERANCES[logits.dtype])


def check_soft(loss_: Callable[..., None], logits: Tensor, candidates: int) -> None:
    rows, vocab = logits.shape
    labels = labels_of(rows * candidates, vocab).view(rows, candidates)
    weights = torch.randn(rows, candidates, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    exact = logits.detach().double().requires_grad_()
    losses = -exact.log_softmax(-1).gather(1, labels)
    (gradient,) = torch.autograd.grad((weights * losses).sum(), exact)
    found = torch.full((rows, candidates + 1), math.nan, dtype=torch.float64, device=DEVICE)
    loss_(logits, labels, weights, found)
    torch.testing.assert_close(found[:, :-1], losses.detach(), rtol=1e-5, atol=1e-5)
    assert found[:, -1].tolist() == (exact.gather(1, labels[:, :1])[:, 0] == exact.amax(1)).double().tolist()
    rtol = TOLERANCES[logits.dtype]
    bound = rtol * max(1.0, float(weights.abs().sum(1).max()))
    torch.testing.assert_close(logits.double(), gradient, rtol=rtol, atol=bound)


@by
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 7), (5, 32), (9, 101)])
def test_likelihoods_and_their_gradients(by: str, dtype: torch.dtype, rows: int, vocab: int) -> None:
    labels = labels_of(rows, vocab)
    losses_of = partial(functional.cross_entropy, target=labels, reduction="none")
    check(LIKELIHOODS[by], losses_of, random_logits(rows, vocab, dtype), labels)


@by
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 7), (5, 32), (9, 101)])
def test_divergences_and_their_gradients(by: str, dtype: torch.dtype, rows: int, vocab: int) -> None:
    labels, teacher = labels_of(rows, vocab), random_logits(rows, vocab, dtype, seed=2)

    def losses_of(logits: Tensor) -> Tensor:
        taught = teacher.double().log_softmax(-1)
        return functional.kl_div(logits.log_softmax(-1), taught, reduction="none", log_target=True).sum(1)

    check(DIVERGENCES[by], losses_of, random_logits(rows, vocab, dtype), labels, teacher)


@by
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_tokens_that_are_no_candidates_count_as_one(by: str, dtype: torch.dtype) -> None:
    """A model that has the weights' distribution is where the gradient ends; candidates without weight do not count."""
    logits = random_logits(5, 70, dtype)
    exact = logits.detach().double().requires_grad_()
    shares = exact.softmax(-1)
    labels = torch.tensor([[0, 7, 7, 69, -1]], device=DEVICE).repeat(5, 1)
    weights = torch.tensor([[0.5, 0.2, 0.0, 0.1, 0.2]], device=DEVICE).repeat(5, 1)
    inside = shares[:, [0, 7, 69]]
    rest = 1 - inside.sum(1, keepdim=True)
    losses = -torch.cat([inside[:, :2], inside[:, 1:], rest], 1).log()
    (gradient,) = torch.autograd.grad((weights * losses).sum(), exact)
    found = torch.full((5, 6), math.nan, dtype=torch.float64, device=DEVICE)
    SOFT[by](logits, labels, weights, found)
    torch.testing.assert_close(found[:, :-1], losses.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits.double(), gradient, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@by
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("rows", "vocab", "candidates"), [(1, 1, 1), (3, 40, 5), (9, 101, 20)])
def test_soft_cross_entropies_and_their_gradients(
    by: str, dtype: torch.dtype, rows: int, vocab: int, candidates: int
) -> None:
    """Weights have either sign, and a candidate may be listed twice."""
    check_soft(SOFT[by], random_logits(rows, vocab, dtype), candidates)


@by
def test_a_student_that_equals_its_teacher_has_nothing_to_learn(by: str) -> None:
    logits, found = random_logits(4, 50), torch.empty(4, 2, dtype=torch.float64, device=DEVICE)
    DIVERGENCES[by](logits, logits.clone(), labels_of(4, 50), found)
    assert found[:, 0].tolist() == [0.0] * 4 and not logits.any()


@by
def test_far_and_equal_logits(by: str) -> None:
    """Logits that rise or fall along the row, a label that shares the largest one, tokens that cannot be."""
    logits = torch.arange(70.0).repeat(5, 1)
    logits[1] = -10 * logits[1]
    logits[2] = 3.0
    logits[3, 40:] = -math.inf
    logits[4] = 1e4 * (logits[4] - 35)
    labels = torch.tensor([0, 69, 8, 39, 69])
    losses_of = partial(functional.cross_entropy, target=labels.to(DEVICE), reduction="none")
    check(LIKELIHOODS[by], losses_of, logits.to(DEVICE), labels.to(DEVICE))


@by
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_row_that_is_not_finite_spoils_no_other(by: str, wrong: float) -> None:
    logits, labels = random_logits(3, 100), labels_of(3, 100)
    logits[1, 77] = wrong
    found = torch.empty(3, 2, dtype=torch.float64, device=DEVICE)
    LIKELIHOODS[by](logits, labels, found)
    assert found[:, 0].isfinite().tolist() == [True, False, True]
    assert logits.isfinite().all(1).tolist() == [True, False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [128256, 50257])
def test_whole_vocabularies_on_a_gpu(vocab: int) -> None:
    rows = 300
    labels, teacher = labels_of(rows, vocab), random_logits(rows, vocab, torch.bfloat16, seed=2)
    losses_of = partial(functional.cross_entropy, target=labels, reduction="none")
    logits = random_logits(rows, vocab, torch.bfloat16).contiguous()
    check(launch.negative_log_likelihood_, losses_of, logits.clone(), labels)

    def taught(exact: Tensor) -> Tensor:
        shares = teacher.double().log_softmax(-1)
        return functional.kl_div(exact.log_softmax(-1), shares, reduction="none", log_target=True).sum(1)

    check(launch.divergence_, taught, logits.clone(), labels, teacher)
    check_soft(launch.soft_cross_entropy_, logits, 20)


@pytest.mark.gpu
def test_no_second_tensor_of_the_logits_size_is_allocated() -> None:
    logits, labels = random_logits(64, 32000, torch.bfloat16), labels_of(64, 32000)
    found = torch.empty(64, 2, dtype=torch.float64, device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    formulas.negative_log_likelihood_(logits, labels, found, None)
    assert torch.cuda.max_memory_allocated() == before
