"""Adapters of experts in captured graphs and in training, on a GPU in bfloat16. Run with `pytest -m gpu`.

Every token is computed by all experts, so that rounding changes no choice of the router. What a GPU computes in
bfloat16 must then be as near to float32 as what the CPU computes in bfloat16 by plain torch, up to a factor: both round
the same tensors, but add up in other orders.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

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
from coserve.model.base import Base, wrap_base
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
FACTOR = 2.0
"""How much larger an error may be than that of the CPU's bfloat16."""
CASES = [
    (bounds, chosen)
    for bounds in ((0, 1, 2, 3, 4), (0, 20, 31, 45, 60))
    for chosen in ((0, 1, -1, 2), (1, 1, 1, 1), (-1, 2, 0, 0))
]


def rounded(family: str) -> PreTrainedModel:
    """A model whose weights are numbers of bfloat16, in float32; all of its experts compute a token."""
    return tiny_family(family, num_experts_per_tok=4).to(torch.bfloat16).float()


def adapter(base: Base, rank: int, names: tuple[str, ...], seed: int, dtype: torch.dtype) -> LoraWeights:
    """Random pairs, numbers of bfloat16 whatever the dtype."""
    g, sites = torch.Generator().manual_seed(seed), {}
    for name, spec in (base.spec.sites | base.spec.experts).items():
        if name.endswith(names):
            a = torch.randn(spec.experts * rank, spec.in_features, generator=g).bfloat16()
            b = torch.randn(spec.experts * spec.out_features, rank, generator=g).bfloat16()
            sites[name] = LoraPair(a.to(base.device, dtype), b.to(base.device, dtype), 0.1, experts=spec.experts)
    return LoraWeights(LoraSettings(r=rank, target_parameters=BOTH), sites)


KINDS = ((3, (*BOTH, "q_proj")), (16, BOTH), (40, BOTH[1:]))


def adapters_of(base: Base) -> tuple[LoraWeights, ...]:
    return tuple(adapter(base, rank, names, seed, base.dtype) for seed, (rank, names) in enumerate(KINDS))


def inputs(bounds: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    positions = torch.cat([torch.arange(b - a, device=device) for a, b in pairwise(bounds)])
    return torch.arange(bounds[-1], device=device) % 100 + 5, positions


def plain(base: Base, bounds: tuple[int, ...], chosen: tuple[int, ...]) -> Tensor:
    """Logits by plain torch, on the CPU and in float32 if they were not."""
    batch = LoraBatch(Segments(bounds, chosen), adapters_of(base), GROUPED)
    with torch.no_grad():
        found = base.forward(*inputs(bounds, base.device), PackedAttention(bounds), lora=batch, keep=None)
    return found.float().cpu()


def row_errors(got: Tensor, wanted: Tensor) -> Tensor:
    return (got - wanted).norm(dim=1) / wanted.norm(dim=1)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_compiled_steps_over_slots_are_as_near_to_float32_as_plain_torch(family: str) -> None:
    """Of 60 rows and of few, for ranks 3, 16 and 40: the worst row of each batch."""
    exact = wrap_base(rounded(family), name=family)
    half = wrap_base(rounded(family).bfloat16(), name=family)
    wanted = [plain(exact, *case) for case in CASES]
    errors = [row_errors(plain(half, *case), own).max() for case, own in zip(CASES, wanted, strict=True)]
    most = FACTOR * float(max(errors))
    without = row_errors(plain(exact, CASES[1][0], (-1,) * 4), wanted[1])
    assert float(without.min()) > 2 * most, "an adapter that is left out would not be seen"
    base = gpu_base(rounded(family), torch.bfloat16)
    fused = FusedBase(base)
    fused.check()
    slots = AdapterSlots(fused.groups, 4, DEVICE, fused.exchanges, base.sites.biases, [*base.spec.experts])
    host = [packed(one, pinned=True) for one in adapters_of(base)]
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
    executor = graphs(FusedBase(base), kv, SEGMENTED, max_running=8, step_tokens=256)
    gen = Generator(base, shelf.store(), kv, executor, max_running=8, step_tokens=256)
    first, second = (collect(gen, requests) for _ in range(2))
    assert {id: tokens for id, (tokens, _) in first.items()} == {id: tokens for id, (tokens, _) in second.items()}
    assert {footprint.experts for _, footprint in executor.decode_graphs} >= {True}


def gradients(base: Base, backend: LoraBackend) -> dict[str, tuple[Tensor, Tensor]]:
    """Of an adapter's fp32 masters, after one micro-batch."""
    start = adapter(base, 8, (*BOTH, "q_proj"), 0, torch.float32)
    optimizer = AdapterOptimizer(start, base.spec, TrainingSettings(), base.dtype, base.device)
    rows = pack_rows(random_corpus(3, (20, 9, 33)), [0, 1, 2], base.device)
    lora = LoraBatch(Segments((0, rows.tokens), (0,)), (optimizer.weights(),), backend)
    runner = MicroBatchRunner(base, recompute=False)
    run_to_end(runner.forward_backward(rows, lora, optimizer.trainable, optimizer.grads))
    found = {}
    for site, pair in optimizer.weights().sites.items():
        assert pair.main_grads is not None
        found[site] = pair.main_grads.a_RD.cpu(), pair.main_grads.b_OR.cpu()
    return found


def site_errors(got: dict[str, tuple[Tensor, Tensor]], wanted: dict[str, tuple[Tensor, Tensor]]) -> list[float]:
    pairs = ((own, other) for site in wanted for own, other in zip(got[site], wanted[site], strict=True))
    return [float((own - other).norm() / other.norm()) for own, other in pairs]


@pytest.mark.parametrize("backend", [GROUPED, SEGMENTED], ids=str)
def test_gradients_in_bfloat16_are_as_near_to_float32_as_those_of_a_cpu(backend: LoraBackend) -> None:
    """With attention's adapters, whose gradients the segmented kernels sum themselves."""
    wanted = gradients(wrap_base(rounded("mixtral"), name="mixtral"), GROUPED)
    half = site_errors(gradients(wrap_base(rounded("mixtral").bfloat16(), name="mixtral"), GROUPED), wanted)
    got = site_errors(gradients(gpu_base(rounded("mixtral"), torch.bfloat16), backend), wanted)
    for site, own, other in zip([name for name in wanted for _ in "ab"], got, half, strict=True):
        assert own <= FACTOR * max(other, sum(half) / len(half)), (site, got, half)
