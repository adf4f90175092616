"""Experts' adapters in slots, as compiled steps read them: the kernels (Triton's interpreter without a GPU) against
plain torch."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from coserve.core.types import AdapterRef
from coserve.generate.execution.adapter_slots import AdapterSlots
from coserve.generate.execution.graph_sizes import TileCapacity
from coserve.generate.execution.slot_lora import StaticSlotLora, slot_lora
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.lora.segments import Segments
from coserve.lora.store.packing import packed
from coserve.model.base import wrap_base
from coserve.model.fused import FusedBase
from coserve.model.lora import LoraBatch, LoraWeights
from tests.support.examples import in_turns
from tests.support.families import tiny_family
from tests.support.generation import adapter
from tests.support.lora_backends import GROUPED

BOUNDS = (0, 5, 8, 9, 13)
TOKENS = torch.arange(13) + 5
POSITIONS = torch.cat([torch.arange(end - start) for start, end in pairwise(BOUNDS)])


def test_steps_over_slots_equal_plain_torch() -> None:
    """Ranks of no whole vector and above a block of ranks, an adapter of down alone, tokens of none, an idle slot."""
    base = wrap_base(tiny_family("gpt_oss", num_hidden_layers=1, layer_types=["full_attention"]), name="gpt_oss")
    both = ("experts.gate_up_proj", "experts.down_proj")
    adapters = [
        adapter(base, 1, 3, ("q_proj",), both),
        adapter(base, 2, 18, (), both[1:]),
        adapter(base, 3, 4, ("o_proj",)),
    ]
    segments = Segments(BOUNDS, (2, 0, -1, 1))

    def plain(adapters: list[LoraWeights], segments: Segments) -> Tensor:
        with torch.no_grad():
            batch = LoraBatch(segments, tuple(adapters), GROUPED)
            return base.forward(TOKENS, POSITIONS, PackedAttention(BOUNDS), lora=batch, keep=None)

    expected = plain(adapters, segments)
    other = plain(adapters, Segments(BOUNDS, (1, -1, 0, 0)))
    fused = FusedBase(base, compiled=False)
    fused.check()
    slots = AdapterSlots(fused.groups, 4, base.device, fused.exchanges, base.sites.biases, [*base.spec.experts])
    placed = {AdapterRef(str(i), 1): packed(one, for_kernels=False) for i, one in enumerate(adapters)}
    found = slots.place(placed)
    own = replace(segments, adapters=tuple(found[i] if i >= 0 else -1 for i in segments.adapters))
    footprint = slots.footprint(own)
    assert footprint.experts and footprint.max_rank == 32
    static = StaticSlotLora(slots, 16, footprint, [TileCapacity(64, 16)])
    turned = replace(own, adapters=(found[1], -1, found[0], found[0]))
    for lora, wanted in ((slot_lora(slots, own), expected), (static.within(static.load(turned)), other)):
        got = fused.forward(TOKENS, POSITIONS, PackedAttention(BOUNDS), lora=lora, keep=None)
        torch.testing.assert_close(got, wanted, atol=3e-4, rtol=1e-3)
    only = replace(own, adapters=(found[2], -1, -1, -1))
    assert not slots.footprint(only).experts and slot_lora(slots, only).experts is None
    slots.free(AdapterRef("0", 1))
    assert not slots.footprint(replace(own, adapters=(found[0], -1, -1, -1))).experts


@pytest.mark.parametrize("family", in_turns(["gpt_oss", "qwen3_moe"], days=2))
def test_layers_with_experts_compile_into_one_graph(family: str) -> None:
    """Traced by torch.compile, without inductor."""
    base = wrap_base(tiny_family(family), name=family)
    fused = FusedBase(base, backend=lambda module, inputs: module.forward)
    fused.check()
