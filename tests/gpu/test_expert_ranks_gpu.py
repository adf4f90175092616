"""Mixtures of experts on two GPUs in bfloat16, by features and by experts: logits and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from coserve.core.types import AdapterRef
from coserve.generate.execution.adapter_slots import AdapterSlots
from coserve.generate.execution.slot_lora import slot_lora
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.lora.segments import Segments
from coserve.lora.store.packing import copied_into, packed, packed_bytes
from coserve.model.fused import FusedBase
from coserve.model.load import load_base
from coserve.model.parallel.mesh import Mesh
from tests.support.lora_backends import GROUPED
from tests.support.ranks import Ranks
from tests.support.rounded_experts import (
    CASES,
    Gradients,
    adapters_of,
    check_gradients,
    gradients,
    inputs,
    plain,
    rounded,
    row_errors,
    wanted_logits,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def on_ranks(mesh: Mesh, folder: str, ep: int) -> tuple[list[Tensor], list[Tensor], Gradients]:
    """Logits of each case by plain torch, and by compiled layers over slots; whole gradients."""
    base = load_base(folder, device="cuda", dtype="bfloat16", mesh=mesh, ep=ep)
    eager, learned = [plain(base, *case) for case in CASES], gradients(base, GROUPED)
    fused, by_slots = FusedBase(base), list[Tensor]()
    fused.check()
    slots = AdapterSlots(fused.groups, 4, base.device, fused.exchanges, base.sites.biases, [*base.spec.experts])
    host = [packed(one, for_kernels=True) for one in adapters_of(base)]
    on_gpu = [copied_into(torch.empty(packed_bytes(one), dtype=torch.uint8, device=base.device), one) for one in host]
    found = slots.place({AdapterRef(str(i), 1): one for i, one in enumerate(on_gpu)})
    for bounds, chosen in CASES:
        lora = slot_lora(slots, Segments(bounds, tuple(found[i] if i >= 0 else -1 for i in chosen)))
        got = fused.forward(*inputs(bounds, base.device), PackedAttention(bounds), lora=lora, keep=None)
        by_slots.append(got.float().cpu())
    return eager, by_slots, learned


@pytest.mark.parametrize("ep", [1, 2], ids=["features", "experts"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_two_gpus_are_as_near_to_float32_as_plain_torch_on_a_cpu(
    two: Ranks, tmp_path: Path, family: str, ep: int
) -> None:
    """By experts, half of the rows are of the other GPU's, and products leave their memory as it is."""
    rounded(family).to(torch.bfloat16).save_pretrained(tmp_path)
    wanted, most = wanted_logits(family)
    for eager, by_slots, learned in two.run(on_ranks, str(tmp_path), ep):
        for found in (eager, by_slots):
            for case, got, own in zip(CASES, found, wanted, strict=True):
                assert float(row_errors(got, own).max()) <= most, (case, row_errors(got, own), most)
        check_gradients(family, learned)
