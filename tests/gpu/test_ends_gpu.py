"""Adapters of the embedding and the head beside captured graphs, and jobs that learn them, on a GPU. Run with
`pytest -m gpu`."""

from __future__ import annotations

import msgspec
import pytest
import torch

from coserve.core.names import TOKEN_ROWS
from coserve.core.training.settings import TrainingSettings
from coserve.core.types import AdapterRef, LoraSettings
from coserve.data.corpus.batch import corpus_batch
from coserve.finetune.encoder import encode, with_encoder
from coserve.finetune.init import new_adapter
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.packed_rows import pack_jobs
from coserve.generate.generator import Generator
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair
from coserve.memory.kv import KvCache
from coserve.model.adapters.end_sites import replaced
from coserve.model.base import Base
from coserve.model.fused import FusedBase
from coserve.model.lora import LoraBatch, LoraWeights
from tests.support.executors import graphs
from tests.support.finetuning import pack_rows, random_corpus
from tests.support.generation import adapter, collect, prompt
from tests.support.gpu_engine import gpu_base, request, texts
from tests.support.lora_backends import REFERENCE, SEGMENTED
from tests.support.records import make_spec
from tests.support.shelf import Shelf
from tests.support.tiny_models import VOCAB, tiny_model

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
TOKENS = {"model.embed_tokens": tuple(range(20, 60))}


def of_ends(base: Base, seed: int, rank: int) -> LoraWeights:
    """A LoRA of all sites and of the head, with trained tokens."""
    plain, (vocab, hidden) = adapter(base, seed, rank), base.model.get_output_embeddings().weight.shape
    like = next(iter(plain.sites.values())).a_RD
    head = LoraPair(torch.randn(rank, hidden).to(like) * 0.1, torch.randn(vocab, rank).to(like) * 0.1, 0.7)
    rows = replaced(torch.randn(40, hidden).to(like))
    settings = msgspec.structs.replace(plain.settings, trainable_token_indices=TOKENS)
    return LoraWeights(settings, {**plain.sites, "lm_head": head, "model.embed_tokens" + TOKEN_ROWS: rows})


def test_texts_beside_graphs_are_those_of_plain_steps() -> None:
    base = gpu_base(tiny_model("llama"))
    refs = [AdapterRef(f"a{i}", 1) for i in range(3)]
    shelf = Shelf(dict(zip(refs, (adapter(base, 0, 4), of_ends(base, 1, 16), of_ends(base, 2, 3)), strict=True)))
    requests = [request(str(n), prompt(n), refs[n % 4] if n % 4 < 3 else None) for n in (3, 17, 41, 2, 5, 23, 34)]
    expected, fused = texts(base, requests, shelf, lora_backend=REFERENCE), FusedBase(base)
    kv = KvCache.for_base(base, 4096, 16)
    executor = graphs(fused, kv, SEGMENTED, max_running=16)
    gen = Generator(base, shelf.store(), kv, executor, max_running=16, step_tokens=256)
    for _ in range(2):
        assert {id: tokens for id, (tokens, _) in collect(gen, requests).items()} == expected


def test_a_job_learns_embedding_and_head() -> None:
    base, corpus = gpu_base(tiny_model("llama")), random_corpus()
    settings = LoraSettings(r=8, targets=("q_proj", "lm_head"), trainable_token_indices=TOKENS)
    start = base.begun(new_adapter(settings, base.spec, seed=3, dtype=torch.float32, device="cuda"))
    optimizer = AdapterOptimizer(start, base.spec, TrainingSettings(), base.dtype)
    runner, rows, losses = MicroBatchRunner(base, recompute=False), pack_rows(corpus, [0, 1, 2], DEVICE), list[float]()
    for _ in range(4):
        lora = LoraBatch(Segments((0, rows.tokens), (0,)), (optimizer.weights(),), SEGMENTED)
        step = runner.forward_backward(rows, lora, optimizer.trainable, optimizer.grads)
        losses.append(float(run_to_end(step)[0, 0]))
        optimizer.step(targets=rows.targets, learning_rate=1e-2)
    assert losses[-1] < losses[0]
    learned = optimizer.masters().sites
    assert all(not torch.equal(pair.a_RD, start.sites[name].a_RD) for name, pair in learned.items())


def test_an_encoder_learns_and_changes_no_decoded_token() -> None:
    """The kernels add LoRA terms to the tokens that it reads alone: losses are those of the reference."""
    base, corpus = gpu_base(tiny_model("llama")), random_corpus()
    memory = (VOCAB - 1, VOCAB - 2)
    settings = LoraSettings(r=8, trainable_token_indices={"model.embed_tokens": memory})
    spec = make_spec(lora=settings, training=TrainingSettings(), prefix=(5, 6, 7, *memory, 8, 9, *memory))
    start = base.begun(new_adapter(settings, base.spec, seed=3, dtype=torch.float32, device="cuda"))
    rows = pack_jobs([with_encoder(spec, corpus_batch(corpus, [0, 1, 2]))], DEVICE)
    runner, losses = MicroBatchRunner(base, recompute=False), list[list[float]]()
    for backend in (REFERENCE, SEGMENTED):
        optimizer = AdapterOptimizer(start, base.spec, TrainingSettings(), base.dtype)
        losses.append([])
        for _ in range(4):
            lora = LoraBatch(rows.segments, (optimizer.weights(),), backend)
            step = runner.forward_backward(rows, lora, optimizer.trainable, optimizer.grads)
            losses[-1].append(float(run_to_end(step)[0, 0]))
            optimizer.step(targets=rows.targets, learning_rate=1e-2)
        made = encode(spec, base, optimizer.weights(), backend)
        assert made.settings.r == 2 * len(memory)
    assert losses[1][-1] < losses[1][0]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
