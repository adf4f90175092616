"""DoRA adapters in captured graphs and compiled training layers, on a GPU. Run with `pytest -m gpu`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from coserve.core.training.settings import TrainingSettings
from coserve.core.types import AdapterRef, LoraSettings
from coserve.finetune.init import new_adapter
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.generate.generator import Generator
from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.segments import Segments
from coserve.memory.kv import KvCache
from coserve.model.base import Base, wrap_base
from coserve.model.fused import FusedBase
from coserve.model.layers import LayerCut
from coserve.model.lora import LoraBatch, LoraWeights
from coserve.model.training.compiled_layers import CompiledLayers
from tests.support.executors import graphs
from tests.support.finetuning import pack_rows, random_corpus
from tests.support.generation import adapter, collect, prompt
from tests.support.gpu_engine import gpu_base, request, texts
from tests.support.lora_backends import GROUPED, REFERENCE, SEGMENTED
from tests.support.shelf import Shelf
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


def dora(base: Base, seed: int, rank: int) -> LoraWeights:
    """A DoRA adapter as served."""
    plain = adapter(base, seed, rank)
    sites = {
        name: replace(pair, magnitude_O=1.5 * norms_O)
        for (name, pair), norms_O in zip(plain.sites.items(), base.row_norms(plain.sites).values(), strict=True)
    }
    return base.served(LoraWeights(LoraSettings(r=rank, use_dora=True), sites))


@pytest.mark.parametrize("family", ["llama", "phi"])
def test_graphs_give_the_texts_of_plain_steps(family: str) -> None:
    """Of the base, a plain and two DoRA adapters in one batch; a graph without DoRA is captured apart."""
    base = gpu_base(tiny_model(family))
    refs = [AdapterRef(f"a{i}", 1) for i in range(3)]
    shelf = Shelf(dict(zip(refs, (adapter(base, 0, 4), dora(base, 1, 16), dora(base, 2, 3)), strict=True)))
    requests = [request(str(n), prompt(n), refs[n % 4] if n % 4 < 3 else None) for n in (3, 17, 41, 2, 5, 23, 34)]
    expected, fused = texts(base, requests, shelf, lora_backend=REFERENCE), FusedBase(base)
    kv = KvCache.for_base(base, 4096, 16)
    executor = graphs(fused, kv, SEGMENTED, max_running=16)
    gen = Generator(base, shelf.store(), kv, executor, max_running=16, step_tokens=256)
    for _ in range(2):
        assert {id: tokens for id, (tokens, _) in collect(gen, requests).items()} == expected
    assert {footprint.scaled for _, footprint in executor.decode_graphs} == {False, True}


def gradients(base: Base, lora_backend: LoraBackend, compiled: CompiledLayers | None) -> list[Tensor]:
    settings = LoraSettings(r=16, use_dora=True)
    start = base.begun(new_adapter(settings, base.spec, seed=3, dtype=torch.float32, device="cuda"))
    for pair in start.sites.values():
        pair.b_OR.normal_(std=0.05, generator=torch.Generator("cuda").manual_seed(1))
        assert pair.magnitude_O is not None
        pair.magnitude_O.mul_(1.2)
    optimizer = AdapterOptimizer(start, base.spec, TrainingSettings(), base.dtype, row_norms=base.row_norms)
    rows = pack_rows(random_corpus(lengths=(90, 33, 7, 64)), (0, 1, 2, 3), DEVICE)
    lora = LoraBatch(Segments((0, rows.tokens), (0,)), (optimizer.weights(),), lora_backend)
    runner = MicroBatchRunner(base, recompute=False, compiled=compiled)
    run_to_end(runner.forward_backward(rows, lora, optimizer.trainable, optimizer.grads))
    optimizer.divide_grads(1)
    return [each for layer in optimizer.grads for each in layer]


def test_compiled_layers_learn_what_autograd_learns() -> None:
    base = wrap_base(tiny_model("llama").to(DEVICE, torch.bfloat16), name="llama")
    expected = gradients(base, GROUPED, None)
    compiled = CompiledLayers(base, LayerCut(base))
    compiled.compile()
    for found in (gradients(base, SEGMENTED, None), gradients(base, SEGMENTED, compiled)):
        for own, right in zip(found, expected, strict=True):
            assert float((own - right).norm() / right.norm().clamp_min(1e-6)) < 0.08
