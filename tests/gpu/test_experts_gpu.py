"""Adapters of experts in captured graphs and in training, on a GPU in bfloat16. Run with `pytest -m gpu`."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from coserve.core.types import AdapterRef, LoraSettings, TrainingSettings
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.packed_rows import pack_rows
from coserve.generate.execution.adapter_slots import AdapterSlots
from coserve.generate.execution.slot_lora import slot_lora
from coserve.generate.generator import Generator
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair
from coserve.lora.store.packing import copied_into, packed, packed_bytes
from coserve.memory.kv import KvCache
from coserve.model.base import Base
from coserve.model.fused import FusedBase
from coserve.model.lora import LoraBatch, LoraWeights
from tests.support.executors import graphs
from tests.support.families import tiny_family
from tests.support.finetuning import random_corpus
from tests.support.generation import collect
from tests.support.gpu_engine import gpu_base, prompt, request
from tests.support.lora_backends import GROUPED, SEGMENTED
from tests.support.shelf import Shelf

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:\\sOnline softmax is disabled:UserWarning")]

DEVICE = torch.device("cuda", 0)
BOTH = ("experts.gate_up_proj", "experts.down_proj")


def adapter(base: Base, rank: int, names: tuple[str, ...], seed: int, dtype: torch.dtype) -> LoraWeights:
    g, sites = torch.Generator().manual_seed(seed), {}
    for name, spec in (base.spec.sites | base.spec.experts).items():
        if name.endswith(names):
            a = torch.randn(spec.experts * rank, spec.in_features, generator=g)
            b = torch.randn(spec.experts * spec.out_features, rank, generator=g)
            sites[name] = LoraPair(a.to(DEVICE, dtype), b.to(DEVICE, dtype), 0.1, experts=spec.experts)
    return LoraWeights(LoraSettings(r=rank, target_parameters=BOTH), sites)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_compiled_steps_over_slots_equal_plain_torch(family: str) -> None:
    """Of 300 rows and of few, for ranks 3, 16 and 40."""
    base = gpu_base(tiny_family(family), torch.bfloat16)
    kinds = ((3, (*BOTH, "q_proj")), (16, BOTH), (40, BOTH[1:]))
    adapters = [adapter(base, rank, names, seed, base.dtype) for seed, (rank, names) in enumerate(kinds)]
    fused = FusedBase(base)
    fused.check()
    slots = AdapterSlots(fused.groups, 4, DEVICE, fused.exchanges, base.sites.biases, [*base.spec.experts])
    host = [packed(one, pinned=True) for one in adapters]
    there = [copied_into(torch.zeros(packed_bytes(one) + 64, dtype=torch.uint8, device=DEVICE), one) for one in host]
    found = slots.place({AdapterRef(str(i), 1): one for i, one in enumerate(there)})
    for bounds in ((0, 1, 2, 3, 4), (0, 20, 31, 45, 60)):
        tokens = torch.arange(bounds[-1], device=DEVICE) % 100 + 5
        positions = torch.cat([torch.arange(b - a, device=DEVICE) for a, b in pairwise(bounds)])
        for chosen in ((0, 1, -1, 2), (1, 1, 1, 1), (-1, 2, 0, 0)):
            batch = LoraBatch(Segments(bounds, chosen), tuple(adapters), GROUPED)
            with torch.no_grad():
                want = base.forward(tokens, positions, PackedAttention(bounds), lora=batch, keep=None).float()
            own = Segments(bounds, tuple(found[i] if i >= 0 else -1 for i in chosen))
            lora = slot_lora(slots, own)
            got = fused.forward(tokens, positions, PackedAttention(bounds), lora=lora, keep=None).float()
            # Of most rows: rounding changes the choice of an expert in a few.
            error = ((got - want).norm(dim=1) / want.norm(dim=1)).median()
            assert error < 0.05, (family, bounds, chosen, float(error))


def test_graphs_give_the_same_texts_each_time_and_serve_none_by_graphs_of_their_own() -> None:
    base = gpu_base(tiny_family("mixtral"), torch.bfloat16)
    refs = [AdapterRef(f"a{i}", 1) for i in range(2)]
    both = (adapter(base, 4, BOTH, 0, base.dtype), adapter(base, 16, (*BOTH, "q_proj"), 1, base.dtype))
    shelf = Shelf(dict(zip(refs, both, strict=True)))
    requests = [request(str(n), prompt(n), refs[n % 3] if n % 3 < 2 else None) for n in (3, 17, 41, 2, 5)]
    kv = KvCache.for_base(base, 8192, 16)
    executor = graphs(FusedBase(base), kv, SEGMENTED, max_running=8, step_tokens=256)
    gen = Generator(base, shelf.store(), kv, executor, max_running=8, step_tokens=256)
    first, second = (collect(gen, requests) for _ in range(2))
    assert {id: tokens for id, (tokens, _) in first.items()} == {id: tokens for id, (tokens, _) in second.items()}
    assert {footprint.experts for _, footprint in executor.decode_graphs} >= {True}


@pytest.mark.parametrize("backend", [GROUPED, SEGMENTED], ids=str)
def test_gradients_in_bfloat16_are_near_those_in_float32(backend: LoraBackend) -> None:
    """With attention's adapters, whose gradients the segmented kernels sum themselves."""
    norms = []
    for dtype, own in ((torch.float32, GROUPED), (torch.bfloat16, backend)):
        base = gpu_base(tiny_family("mixtral"), dtype)
        start = adapter(base, 8, (*BOTH, "q_proj"), 0, torch.float32)
        optimizer = AdapterOptimizer(start, base.spec, TrainingSettings(), base.dtype, DEVICE)
        rows = pack_rows(random_corpus(3, (20, 9, 33)), [0, 1, 2], DEVICE)
        lora = LoraBatch(Segments((0, rows.tokens), (0,)), (optimizer.weights(),), own)
        run_to_end(
            MicroBatchRunner(base, recompute=False).forward_backward(rows, lora, optimizer.trainable, optimizer.grads)
        )
        norms.append({site: pair.main_grads for site, pair in optimizer.weights().sites.items()})
    for site, wanted in norms[0].items():
        got = norms[1][site]
        assert wanted is not None and got is not None
        for one, other in ((got.a_RD, wanted.a_RD), (got.b_OR, wanted.b_OR)):
            assert float((one - other).norm() / other.norm()) < 0.2, site
