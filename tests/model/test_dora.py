"""DoRA adapters at the base's sites, in one batch with others: each row gets what PEFT gives its sequence alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from coserve.generate.execution.adapter_slots import AdapterSlots
from coserve.generate.execution.graph_sizes import TileCapacity
from coserve.generate.execution.slot_lora import StaticSlotLora, slot_lora
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.lora.interface import LoraBackend, PreparedLora
from coserve.kernels.lora.segments import Segments
from coserve.lora.store.files import load_adapter
from coserve.lora.store.packing import copied_into, packed, packed_bytes
from coserve.model.base import Base, wrap_base
from coserve.model.fused import FusedBase
from coserve.model.lora import LoraBatch, LoraWeights
from tests.support.lora_backends import BLOCK_SPARSE, GROUPED, NAIVE, REFERENCE, SEGMENTED
from tests.support.lora_reference import alone, save_peft, tokens_of
from tests.support.lora_reference import packed as packed_logits
from tests.support.sharded import Kind, save_base, train
from tests.support.shelf import named
from tests.support.tiny_models import tiny_model

LENGTHS, BATCH = (5, 9, 3, 4), (1, -1, 0, 1)
"""Of each sequence; adapter 1 is DoRA, -1 is the base alone."""
BOUNDS = (0, 5, 14, 17, 21)
SEQUENCES = [tokens_of(length, seed) for seed, length in enumerate(LENGTHS)]


def made(family: str, folder: Path) -> tuple[Base, tuple[LoraWeights, ...], list[Tensor]]:
    """A base, a plain and a DoRA adapter as served, and PEFT's logits of each sequence."""
    base, fan = wrap_base(tiny_model(family), name="tiny"), {"fan_in_fan_out": family == "gpt2"}
    names = list(base.spec.default_targets)
    plain = save_peft(tiny_model(family), folder / "0", seed=0, r=3, lora_alpha=5, target_modules=names[:1], **fan)
    dora = save_peft(tiny_model(family), folder / "1", seed=1, r=5, target_modules=names[1:], use_dora=True, **fan)
    models = {-1: tiny_model(family), 0: plain, 1: dora}
    adapters = [load_adapter(folder / str(i), base.spec, dtype=torch.float32) for i in range(2)]
    expected = [alone(models[own], tokens_T) for own, tokens_T in zip(BATCH, SEQUENCES, strict=True)]
    return base, tuple(base.served(one) for one in adapters), expected


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("llama", REFERENCE),
        ("llama", NAIVE),
        ("phi", GROUPED),
        ("gpt2", GROUPED),
        pytest.param("llama", BLOCK_SPARSE, marks=pytest.mark.slow),
        pytest.param("phi", SEGMENTED, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rows_of_a_mixed_batch_equal_pefts(family: str, backend: LoraBackend, tmp_path: Path) -> None:
    base, adapters, expected = made(family, tmp_path)
    got = packed_logits(base, SEQUENCES, LoraBatch(Segments(BOUNDS, BATCH), adapters, backend))
    without = packed_logits(base, SEQUENCES)
    for own, mine_TV, peft_TV, base_TV in zip(BATCH, got, expected, without, strict=True):
        torch.testing.assert_close(mine_TV, peft_TV, rtol=2e-4, atol=2e-4)
        assert torch.equal(mine_TV, base_TV) == (own == -1)


@pytest.mark.slow
def test_slots_scale_the_rows_of_their_adapters(tmp_path: Path) -> None:
    """By steps of any shape, by graphs of decode and mixed steps, and from the store's pages."""
    base, adapters, expected = made("phi", tmp_path)
    fused = FusedBase(base, compiled=False)
    slots = AdapterSlots(fused.groups, 2, base.device, fused.exchanges, base.sites.biases)
    host = [packed(one, for_kernels=False) for one in adapters]
    paged = [copied_into(torch.zeros(packed_bytes(one) + 64, dtype=torch.uint8), one) for one in host]
    placed = slots.place(named(paged))
    segments = Segments(BOUNDS, tuple(-1 if own < 0 else placed[own] for own in BATCH))
    footprint = slots.footprint(segments)
    assert footprint.scaled
    assert not slots.footprint(Segments((0, 1), (placed[0],))).scaled
    terms: list[PreparedLora] = [slot_lora(slots, segments)]
    for rows in (8, 64):
        static = StaticSlotLora(slots, BOUNDS[-1], footprint, [TileCapacity(rows, 6)])
        terms.append(static.within(static.load(segments)))
    positions_T = torch.cat([torch.arange(length) for length in LENGTHS])
    for lora in terms:
        got = fused.forward(torch.cat(SEQUENCES), positions_T, PackedAttention(BOUNDS), lora=lora, keep=None)
        torch.testing.assert_close(got, torch.cat(expected), rtol=2e-4, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_sites_of_one_input_learn_together_what_each_learns_alone(compiled: bool, tmp_path: Path) -> None:
    """By the segmented kernels, which add to sums of gradients themselves, in compiled layers and in the base's own."""
    folder, kind = save_base(tmp_path, num_hidden_layers=2), Kind(8, dora=True)
    expected = train(None, folder, "nfs", kind, dropout=0.0)
    found = train(None, folder, "nfs", kind, backend="segmented", dropout=0.0, compiled=compiled)
    assert bool(found.passes) == compiled
    assert found.losses == pytest.approx(expected.losses, abs=1e-4)
    assert found.norms == pytest.approx(expected.norms, rel=1e-3)
    for name, tensor in expected.state.items():
        torch.testing.assert_close(found.state[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
