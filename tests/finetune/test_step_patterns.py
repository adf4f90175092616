"""Jobs over any set of sites: some layers, some sites of each, one alone. Against torch's backward through the whole
model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coserve.core.types import LoraSettings
from coserve.finetune.layers.eager import add_gradients
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.lora.interface import LoraBackend
from coserve.model.base import Base, wrap_base
from tests.support.examples import examples
from tests.support.finetuning import CPU, pack_rows, random_corpus, started
from tests.support.lora_backends import BLOCK_SPARSE, GROUPED, NAIVE, REFERENCE, SEGMENTED, lora_of
from tests.support.tiny_models import tiny_model

CORPUS = random_corpus(lengths=(5, 4))
ROWS = [0, 1]
LAYERS = 3
BASE = wrap_base(tiny_model("llama", num_hidden_layers=LAYERS), name="llama")
BY_LAYER = [sorted(site for site, spec in BASE.spec.sites.items() if spec.layer == i) for i in range(LAYERS)]
RUNNERS = {recompute: MicroBatchRunner(BASE, recompute=recompute) for recompute in (False, True)}
SITES = st.lists(st.sets(st.sampled_from(range(len(BY_LAYER[0])))), min_size=LAYERS, max_size=LAYERS)
PATTERNS = SITES.filter(any).map(
    lambda layers: tuple(own[i] for own, some in zip(BY_LAYER, layers, strict=True) for i in sorted(some))
)


def optimizer_of(targets: tuple[str, ...]) -> AdapterOptimizer:
    return started(BASE, LoraSettings(r=2, targets=targets))


def expected(base: Base, targets: tuple[str, ...]) -> tuple[list[float], list[torch.Tensor]]:
    """The summed NLL and how many labels are the likeliest token, and the NLL's gradients, from one graph of the whole
    model."""
    optimizer, rows = optimizer_of(targets), pack_rows(CORPUS, ROWS, CPU)
    attention, lora = PackedAttention(rows.bounds), lora_of(optimizer.weights(), rows.tokens, REFERENCE)
    logits = base.forward(rows.tokens_T, rows.positions_T, attention, lora=lora, keep=rows.keep_K)
    nll = torch.nn.functional.cross_entropy(logits, rows.labels_K, reduction="sum")
    sums = [float(nll.detach()), float((logits.argmax(-1) == rows.labels_K).sum())]
    return sums, list(torch.autograd.grad(nll, [leaf for own in optimizer.trainable for leaf in own]))


@pytest.mark.parametrize("lora_backend", [REFERENCE, NAIVE, GROUPED])
@settings(max_examples=examples(12))
@example(targets=(BY_LAYER[0][0],), recompute=False)
@given(targets=PATTERNS, recompute=st.booleans())
def test_any_sites_learn_as_by_one_backward_of_the_whole_model(
    lora_backend: LoraBackend, targets: tuple[str, ...], recompute: bool
) -> None:
    optimizer, rows = optimizer_of(targets), pack_rows(CORPUS, ROWS, CPU)
    lora, runner = lora_of(optimizer.weights(), rows.tokens, lora_backend), RUNNERS[recompute]
    sums_12 = run_to_end(runner.forward_backward(rows, lora, optimizer.trainable, optimizer.grads))
    sums, gradients = expected(BASE, targets)
    assert sums_12.tolist() == [pytest.approx(sums, rel=1e-4)]
    assert run_to_end(runner.evaluate(rows, lora)).tolist() == [pytest.approx(sums, rel=1e-4)]
    for found, wanted in zip([g for own in optimizer.grads for g in own], gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_logits_that_the_heads_backward_reads_are_not_overwritten() -> None:
    model, targets = tiny_model("llama", num_hidden_layers=LAYERS), tuple(BY_LAYER[1])
    model.lm_head.register_forward_hook(lambda module, args, logits: logits.tanh())  # tanh's backward reads its result
    base = wrap_base(model, name="llama")
    optimizer, rows = optimizer_of(targets), pack_rows(CORPUS, ROWS, CPU)
    runner, lora = MicroBatchRunner(base, recompute=False), lora_of(optimizer.weights(), rows.tokens, GROUPED)
    sums_12 = run_to_end(runner.forward_backward(rows, lora, optimizer.trainable, optimizer.grads))
    sums, gradients = expected(base, targets)
    assert sums_12.tolist() == [pytest.approx(sums, rel=1e-4)]
    for found, wanted in zip([g for own in optimizer.grads for g in own], gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("lora_backend", "recompute"), [(SEGMENTED, False), (SEGMENTED, True), (BLOCK_SPARSE, True)])
def test_kernels_pass_layers_that_learn_nothing(lora_backend: LoraBackend, recompute: bool) -> None:
    targets = (BY_LAYER[0][0], BY_LAYER[2][2])
    optimizer, rows = optimizer_of(targets), pack_rows(CORPUS, ROWS, CPU)
    runner = RUNNERS[recompute]
    run_to_end(
        runner.forward_backward(
            rows, lora_of(optimizer.weights(), rows.tokens, lora_backend), optimizer.trainable, optimizer.grads
        )
    )
    for found, wanted in zip([g for own in optimizer.grads for g in own], expected(BASE, targets)[1], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_a_tensor_that_took_no_part_gets_no_gradient() -> None:
    """An expert that no token was sent to, say."""
    sums = [torch.zeros(2), torch.zeros(2)]
    add_gradients(sums, [None, torch.ones(2)])
    add_gradients(sums, [None, None])
    assert [total.tolist() for total in sums] == [[0, 0], [1, 1]]
