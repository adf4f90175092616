"""A cartridge in training: the loss and its gradients are those of the real `peft` package."""

from __future__ import annotations

import pytest
import torch
from peft import CartridgeConfig, get_peft_model

from coserve.core.training.settings import TrainingSettings
from coserve.core.types import LoraSettings
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.packed_rows import pack_rows
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair
from coserve.lora.store.files import cartridge, embeddings
from coserve.model.lora import LoraBatch, LoraWeights
from tests.support.examples import sample
from tests.support.finetuning import CPU, random_corpus, tiny_base
from tests.support.lora_backends import GROUPED
from tests.support.tiny_models import tiny_model

TOKENS = 7


@pytest.mark.parametrize("family", sample(("llama", "qwen3", "gpt2", "gemma2"), "llama"))
def test_losses_and_gradients_are_pefts(family: str) -> None:
    """Whether layers are computed again or not; the first token is frozen."""
    base, corpus = tiny_base(family), random_corpus()
    torch.manual_seed(0)
    model = get_peft_model(tiny_model(family), CartridgeConfig(num_virtual_tokens=TOKENS, task_type="CAUSAL_LM"))
    encoder, total = model.prompt_encoder["default"], torch.zeros(())
    for first, end in zip(corpus.bounds, corpus.bounds[1:], strict=False):
        ids, target = (torch.tensor(own[first:end].astype("int64")) for own in (corpus.tokens, corpus.target))
        logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        total = total - (logprobs.gather(1, ids[1:, None])[:, 0] * target[1:]).sum()
    total.backward()
    settings = LoraSettings(r=TOKENS, cartridge=True)
    start = cartridge(settings, base.spec, encoder.weight.detach())
    for recompute in (False, True):
        optimizer = AdapterOptimizer(start, base.spec, TrainingSettings(), torch.float32)
        rows = pack_rows(corpus, range(len(corpus.lengths)), CPU)
        lora = LoraBatch(Segments((0, rows.tokens), (0,)), (optimizer.weights(),), GROUPED)
        runner = MicroBatchRunner(base, recompute=recompute)
        ((loss, _),) = run_to_end(runner.forward_backward(rows, lora, optimizer.trainable, optimizer.grads)).tolist()
        ((evaluated, _),) = run_to_end(runner.evaluate(rows, lora)).tolist()
        assert loss == pytest.approx(float(total.detach()), rel=1e-5) == evaluated
        pairs = optimizer.weights().sites.items()
        sums = {site: LoraPair(pair.main_grads.a_RD, pair.main_grads.b_OR, 1.0) for site, pair in pairs}
        found = embeddings(LoraWeights(settings, sums))
        assert not found[0].any()
        torch.testing.assert_close(found[1:], encoder.trainable_embedding.grad, rtol=1e-4, atol=1e-6)
