"""Cartridges and encoders in training: losses and gradients are those of `peft`, and of two passes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from peft import CartridgeConfig, LoraConfig, get_peft_model
from torch import Tensor
from transformers import DynamicCache

from coserve.admission.shapes import lora_shapes
from coserve.core.training.settings import TrainingSettings
from coserve.core.types import LoraSettings
from coserve.data.corpus.batch import corpus_batch
from coserve.data.documents.encoder import encoder_rows, prefix_tokens
from coserve.finetune.encoder import beside, encode, with_encoder
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.packed_rows import pack_jobs
from coserve.kernels.lora.types import LoraPair
from coserve.lora.store.files import embeddings, load_adapter, prefix_pairs
from coserve.model.lora import LoraBatch, LoraWeights
from tests.support.examples import sample
from tests.support.finetuning import CPU, pack_rows, random_corpus, tiny_base
from tests.support.lora_backends import GROUPED, lora_of
from tests.support.records import make_spec
from tests.support.tiny_models import VOCAB, tiny_model

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
    start = LoraWeights(settings, prefix_pairs(base.spec, encoder.weight.detach()))
    for recompute in (False, True):
        optimizer = AdapterOptimizer(start, base.spec, TrainingSettings(), torch.float32)
        rows = pack_rows(corpus, range(len(corpus.lengths)), CPU)
        lora = lora_of(optimizer.weights(), rows.tokens)
        runner = MicroBatchRunner(base, recompute=recompute)
        ((loss, _),) = run_to_end(runner.forward_backward(rows, lora, optimizer.trainable, optimizer.grads)).tolist()
        ((evaluated, _),) = run_to_end(runner.evaluate(rows, lora)).tolist()
        assert loss == pytest.approx(float(total.detach()), rel=1e-5) == evaluated
        pairs = optimizer.weights().sites.items()
        sums = {site: LoraPair(pair.main_grads.a_RD, pair.main_grads.b_OR, 1.0) for site, pair in pairs}
        found = embeddings(LoraWeights(settings, sums))
        assert not found[0].any()
        torch.testing.assert_close(found[1:], encoder.trainable_embedding.grad, rtol=1e-4, atol=1e-6)


CHUNKS = ((5, 6, 7, 8, 9, 3), (10, 11, 12))
MEMORY = (VOCAB - 1, VOCAB - 3, VOCAB - 2)


def read_and_keep(model: torch.nn.Module) -> DynamicCache:
    """The memory tokens' keys and values, chunk by chunk: (1, heads, P, width) of each layer."""
    parts = list[list[tuple[Tensor, Tensor]]]()
    for number, chunk in enumerate(CHUNKS):
        first = number * len(MEMORY)
        positions = torch.tensor([[*range(len(chunk)), *range(first, first + len(MEMORY))]])
        ids = torch.tensor([[*chunk, *MEMORY]])
        cache = model(input_ids=ids, position_ids=positions, use_cache=True).past_key_values
        parts.append([(layer[0][:, :, len(chunk) :], layer[1][:, :, len(chunk) :]) for layer in cache])
    kept = DynamicCache()
    for layer, own in enumerate(zip(*parts, strict=True)):
        kept.update(*(torch.cat(both, 2) for both in zip(*own, strict=True)), layer)
    return kept


@pytest.mark.parametrize("decoder", [False, True])
@pytest.mark.parametrize("family", sample(("llama", "qwen3", "gpt2"), "llama"))
def test_an_encoder_learns_what_two_passes_do(family: str, decoder: bool, tmp_path: Path) -> None:
    """`decoder`: the second pass has a LoRA of its own."""
    base, corpus, embedding = tiny_base(family), random_corpus(), "wte" if family == "gpt2" else "embed_tokens"
    torch.manual_seed(0)
    config = LoraConfig(
        r=3,
        target_modules="all-linear",
        init_lora_weights=False,
        fan_in_fan_out=family == "gpt2",
        trainable_token_indices={embedding: list(MEMORY)},
    )
    model = get_peft_model(tiny_model(family), config)
    model.save_pretrained(str(tmp_path))
    start = load_adapter(tmp_path, base.spec, dtype=torch.float32)
    second = get_peft_model(tiny_model(family), replace(config, trainable_token_indices=None))
    if decoder:
        second.save_pretrained(str(tmp_path / "decoder"))
        beside_it = load_adapter(tmp_path / "decoder", base.spec, dtype=torch.float32)
        pairs = {f"{site}.decoder": pair for site, pair in beside_it.sites.items()}
        start = LoraWeights(msgspec.structs.replace(start.settings, decoder=True), {**start.sites, **pairs})
    total = torch.zeros(())
    for first, end in zip(corpus.bounds, corpus.bounds[1:], strict=False):
        cache = read_and_keep(model)
        ids, target = (torch.tensor(own[first:end].astype("int64")) for own in (corpus.tokens, corpus.target))
        positions = 2 * len(MEMORY) + torch.arange(len(ids))
        with nullcontext() if decoder else second.disable_adapter():
            out = second(input_ids=ids[None], position_ids=positions[None], past_key_values=cache)
        logprobs = out.logits[0, :-1].log_softmax(-1)
        total = total - (logprobs.gather(1, ids[1:, None])[:, 0] * target[1:]).sum()
    total.backward()
    spec = make_spec(
        lora=start.settings,
        training=TrainingSettings(),
        prefix=tuple(id for chunk in CHUNKS for id in (*chunk, *MEMORY)),
    )
    assert encoder_rows(spec) == [[*chunk, *MEMORY] for chunk in CHUNKS]
    assert prefix_tokens(spec) == 2 * len(MEMORY)
    batch = with_encoder(spec, corpus_batch(corpus, range(len(corpus.lengths))))
    rows = pack_jobs([batch], CPU)
    for recompute in (False, True):
        optimizer = AdapterOptimizer(start, base.spec, TrainingSettings(), torch.float32)
        adapters = optimizer.weights().parts
        lora = LoraBatch(rows.segments_of(len(adapters)), adapters, GROUPED)
        runner = MicroBatchRunner(base, recompute=recompute)
        ((loss, _),) = run_to_end(runner.forward_backward(rows, lora, optimizer.trainable, optimizer.grads)).tolist()
        ((evaluated, _),) = run_to_end(runner.evaluate(rows, lora)).tolist()
        assert loss == pytest.approx(float(total.detach()), rel=1e-5) == evaluated
        theirs = {name.removeprefix("base_model.model."): each for name, each in model.named_parameters()}
        others = {name.removeprefix("base_model.model."): each for name, each in second.named_parameters()}
        (rows_of_memory,) = (each for name, each in theirs.items() if "trainable_tokens_delta" in name)
        for site, pair in optimizer.weights().sites.items():
            assert pair.main_grads is not None
            both = [(pair.main_grads.a_RD, rows_of_memory)]
            if not site.endswith("token_adapter"):
                known, named = (others if site.endswith(".decoder") else theirs), site.removesuffix(".decoder")
                ab = (known[f"{named}.lora_{part}.default.weight"] for part in "AB")
                both = [*zip((pair.main_grads.a_RD, pair.main_grads.b_OR), ab, strict=True)]
            for got, their in both:  # the last layer's own output reaches no loss
                want = torch.zeros_like(their) if their.grad is None else their.grad
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    made = encode(spec, base, start, GROUPED)
    with torch.no_grad():
        kept = read_and_keep(model)
    want = torch.cat([part[0].transpose(0, 1).flatten(1) for layer in kept for part in layer[:2]], 1)
    torch.testing.assert_close(embeddings(made), want, rtol=1e-3, atol=1e-4)
    assert (made.settings.cartridge, made.settings.r) == (True, 2 * len(MEMORY))
    if not decoder:
        return
    whole = beside(made, start)
    assert torch.equal(embeddings(whole), embeddings(made))
    assert whole.linear.keys() == beside_it.sites.keys()
    assert all(torch.equal(pair.b_OR, beside_it.sites[site].b_OR) for site, pair in whole.linear.items())
    shapes = lora_shapes(start.settings, base.spec)
    assert {shape.name for shape in shapes} == start.sites.keys()
    assert sum(sum(shape.parts) for shape in shapes) == sum(
        pair.a_RD.numel() + pair.b_OR.numel() for pair in start.sites.values()
    )
