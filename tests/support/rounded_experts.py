"""A mixture of experts whose weights are numbers of bfloat16, and errors of bfloat16 against float32.

Every token is computed by all experts, so that rounding changes no choice of the router. What a GPU computes in
bfloat16 must then be as near to float32 as what the CPU computes in bfloat16 by plain torch, up to a factor: both round
the same tensors, but add up in other orders.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coserve.core.training.settings import TrainingSettings
from coserve.core.types import LoraSettings
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair
from coserve.model.base import Base, wrap_base
from coserve.model.lora import LoraBatch, LoraWeights
from tests.support.families import tiny_family
from tests.support.finetuning import pack_rows, random_corpus
from tests.support.lora_backends import GROUPED

BOTH = ("experts.gate_up_proj", "experts.down_proj")
FACTOR = 2.0
"""How much larger an error may be than that of the CPU's bfloat16."""
CASES = [
    (bounds, chosen)
    for bounds in ((0, 1, 2, 3, 4), (0, 20, 31, 45, 60))
    for chosen in ((0, 1, -1, 2), (1, 1, 1, 1), (-1, 2, 0, 0))
]
"""Bounds of the sequences, and the adapter of each."""
KINDS = ((3, (*BOTH, "q_proj")), (16, BOTH), (40, BOTH[1:]))
"""Ranks and sites of the adapters."""


def rounded(family: str) -> PreTrainedModel:
    """The model in float32."""
    return tiny_family(family, num_experts_per_tok=4).to(torch.bfloat16).float()


def adapter(base: Base, rank: int, names: tuple[str, ...], seed: int, dtype: torch.dtype) -> LoraWeights:
    """Random pairs of the whole base, numbers of bfloat16 whatever the dtype."""
    g, sites = torch.Generator().manual_seed(seed), {}
    for name, spec in (base.spec.sites | base.spec.experts).items():
        if name.endswith(names):
            a = torch.randn(spec.experts * rank, spec.in_features, generator=g).bfloat16()
            b = torch.randn(spec.experts * spec.out_features, rank, generator=g).bfloat16()
            sites[name] = LoraPair(a.to(base.device, dtype), b.to(base.device, dtype), 0.1, experts=spec.experts)
    return LoraWeights(LoraSettings(r=rank, target_parameters=BOTH), sites)


def adapters_of(base: Base) -> tuple[LoraWeights, ...]:
    """This rank's shards of the adapters."""
    whole = (adapter(base, rank, names, seed, base.dtype) for seed, (rank, names) in enumerate(KINDS))
    return tuple(map(base.shard, whole))


def inputs(bounds: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and positions."""
    positions = torch.cat([torch.arange(b - a, device=device) for a, b in pairwise(bounds)])
    return torch.arange(bounds[-1], device=device) % 100 + 5, positions


def plain(base: Base, bounds: tuple[int, ...], chosen: tuple[int, ...]) -> Tensor:
    """Logits by plain torch, on the CPU and in float32 afterwards."""
    batch = LoraBatch(Segments(bounds, chosen), adapters_of(base), GROUPED)
    with torch.no_grad():
        found = base.forward(*inputs(bounds, base.device), PackedAttention(bounds), lora=batch, keep=None)
    return found.float().cpu()


def row_errors(got: Tensor, wanted: Tensor) -> Tensor:
    return (got - wanted).norm(dim=1) / wanted.norm(dim=1)


def wanted_logits(family: str) -> tuple[list[Tensor], float]:
    """Logits of each case in float32, and the error that a row may have."""
    exact, half = wrap_base(rounded(family), name=family), wrap_base(rounded(family).bfloat16(), name=family)
    wanted = [plain(exact, *case) for case in CASES]
    most = FACTOR * float(
        max(row_errors(plain(half, *case), own).max() for case, own in zip(CASES, wanted, strict=True))
    )
    without = row_errors(plain(exact, CASES[1][0], (-1,) * 4), wanted[1])
    assert float(without.min()) > 2 * most, "an adapter that is left out would not be seen"
    return wanted, most


Gradients = dict[str, tuple[Tensor, Tensor]]


def gradients(base: Base, backend: LoraBackend) -> Gradients:
    """Of an adapter's fp32 masters, after one micro-batch, of the whole adapter."""
    start = adapter(base, 8, (*BOTH, "q_proj"), 0, torch.float32)
    partition = base.partition(start)
    optimizer = AdapterOptimizer(start, base.spec, TrainingSettings(), base.dtype, base.device, partition)
    rows = pack_rows(random_corpus(3, (20, 9, 33)), [0, 1, 2], base.device)
    lora = LoraBatch(Segments((0, rows.tokens), (0,)), (optimizer.weights(),), backend)
    runner = MicroBatchRunner(base, recompute=False)
    run_to_end(runner.forward_backward(rows, lora, optimizer.trainable, optimizer.grads))
    found = dict[str, tuple[Tensor, Tensor]]()
    for site, pair in optimizer.weights().sites.items():
        assert pair.main_grads is not None
        found[site] = pair.main_grads.a_RD, pair.main_grads.b_OR
    if partition is not None:
        partition.sum_gradients(found)
        found = partition.gather(found)
    return {site: (a.cpu(), b.cpu()) for site, (a, b) in found.items()}


def check_gradients(family: str, got: Gradients) -> None:
    """Each matrix is as near to float32 as the CPU's bfloat16."""
    wanted = gradients(wrap_base(rounded(family), name=family), GROUPED)
    half = _errors(gradients(wrap_base(rounded(family).bfloat16(), name=family), GROUPED), wanted)
    mean = sum(half.values()) / len(half)
    for which, own in _errors(got, wanted).items():
        assert own <= FACTOR * max(half[which], mean), (which, own, half)


def _errors(got: Gradients, wanted: Gradients) -> dict[str, float]:
    return {
        f"{site}.{kind}": float((own - other).norm() / other.norm())
        for site, both in wanted.items()
        for kind, own, other in zip("ab", got[site], both, strict=True)
    }
