"""Adapters of experts in captured graphs and in training, on a GPU in bfloat16. Run with `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

from coserve.core.types import AdapterRef
from coserve.generate.execution.adapter_slots import AdapterSlots
from coserve.generate.execution.slot_lora import slot_lora
from coserve.generate.generator import Generator
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.segments import Segments
from coserve.lora.store.packing import copied_into, packed, packed_bytes
from coserve.memory.kv import KvCache
from coserve.model.fused import FusedBase
from tests.support.executors import graphs
from tests.support.families import tiny_family
from tests.support.generation import collect, prompt
from tests.support.gpu_engine import gpu_base, request
from tests.support.lora_backends import GROUPED, SEGMENTED
from tests.support.rounded_experts import (
    BOTH,
    CASES,
    adapter,
    adapters_of,
    check_gradients,
    gradients,
    inputs,
    rounded,
    row_errors,
    wanted_logits,
)
from tests.support.shelf import Shelf

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:\\sOnline softmax is disabled:UserWarning")]

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_compiled_steps_over_slots_are_as_near_to_float32_as_plain_torch(family: str) -> None:
    """Of 60 rows and of few, for ranks 3, 16 and 40: every row."""
    wanted, most = wanted_logits(family)
    base = gpu_base(rounded(family), torch.bfloat16)
    fused = FusedBase(base)
    fused.check()
    slots = AdapterSlots(fused.groups, 4, DEVICE, fused.exchanges, base.sites.biases, [*base.spec.experts])
    host = [packed(one, for_kernels=True) for one in adapters_of(base)]
    there = [copied_into(torch.zeros(packed_bytes(one) + 64, dtype=torch.uint8, device=DEVICE), one) for one in host]
    found = slots.place({AdapterRef(str(i), 1): one for i, one in enumerate(there)})
    for (bounds, chosen), own in zip(CASES, wanted, strict=True):
        lora = slot_lora(slots, Segments(bounds, tuple(found[i] if i >= 0 else -1 for i in chosen)))
        attention = PackedAttention(bounds)
        got = fused.forward(*inputs(bounds, DEVICE), attention, lora=lora, keep=None).float().cpu()
        assert float(row_errors(got, own).max()) <= most, (family, bounds, chosen, row_errors(got, own), most)


def test_graphs_give_the_same_texts_each_time_and_serve_none_by_graphs_of_their_own() -> None:
    """With two of four experts chosen."""
    base = gpu_base(tiny_family("mixtral"), torch.bfloat16)
    refs = [AdapterRef(f"a{i}", 1) for i in range(2)]
    both = (adapter(base, 4, BOTH, 0, base.dtype), adapter(base, 16, (*BOTH, "q_proj"), 1, base.dtype))
    shelf = Shelf(dict(zip(refs, both, strict=True)))
    requests = [request(str(n), prompt(n), refs[n % 3] if n % 3 < 2 else None) for n in (3, 17, 41, 2, 5)]
    kv = KvCache.for_base(base, 8192, 16)
    executor = graphs(FusedBase(base), kv, SEGMENTED, max_running=8)
    gen = Generator(base, shelf.store(), kv, executor, max_running=8, step_tokens=256)
    first, second = (collect(gen, requests) for _ in range(2))
    assert {id: tokens for id, (tokens, _) in first.items()} == {id: tokens for id, (tokens, _) in second.items()}
    assert {footprint.experts for _, footprint in executor.decode_graphs} >= {True}


@pytest.mark.parametrize("backend", [GROUPED, SEGMENTED], ids=str)
def test_gradients_in_bfloat16_are_as_near_to_float32_as_those_of_a_cpu(backend: LoraBackend) -> None:
    """With attention's adapters, whose gradients the segmented kernels sum themselves."""
    check_gradients("mixtral", gradients(gpu_base(rounded("mixtral"), torch.bfloat16), backend))
