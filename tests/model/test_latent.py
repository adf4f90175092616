"""Multi-head latent attention over a cache of latents: what PEFT computes with expanded heads, for each kind of
adapter of the projection that is absorbed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from coserve.generate.execution.adapter_slots import AdapterSlots
from coserve.generate.execution.graph_sizes import TileCapacity
from coserve.generate.execution.slot_lora import StaticSlotLora, slot_lora
from coserve.kernels.attention.interface import Attention, KvShape, TokenRun
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.lora.interface import LoraBackend, PreparedLora
from coserve.kernels.lora.segments import Segments
from coserve.lora.store.files import load_adapter
from coserve.memory.buffer import page_layout
from coserve.memory.kv import KvCache
from coserve.model.base import Base, wrap_base
from coserve.model.formats.sizes import config_sizes
from coserve.model.fused import FusedBase
from coserve.model.lora import LoraBatch, LoraWeights, prefix_sites
from coserve.model.quantized.modules import QuantizedLinear, quantize_layers
from tests.support.families import tiny_family
from tests.support.lora_backends import BLOCK_SPARSE, GROUPED, NAIVE, REFERENCE, SEGMENTED
from tests.support.lora_reference import alone, save_peft, tokens_of
from tests.support.shelf import named

PAGE = 4
LENGTHS, BATCH = (5, 9, 3, 4), (1, -1, 0, 1)
"""Of each sequence; adapter 1 is DoRA, -1 is the base alone."""
BOUNDS = (0, 5, 14, 17, 21)
SEQUENCES = [tokens_of(length, seed) for seed, length in enumerate(LENGTHS)]
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])
CLOSE = {"rtol": 2e-4, "atol": 2e-4}


def pages_of(base: Base, lengths: tuple[int, ...] = LENGTHS) -> Attention:
    """Attention of one step in which these sequences begin."""
    kv = KvCache.for_base(base, 256, PAGE)
    return kv.attention([TokenRun(length, 0, tuple(kv.allocate(-(-length // PAGE)) or ())) for length in lengths])


def made(folder: Path, family: str = "deepseek_v3") -> tuple[Base, tuple[LoraWeights, ...], Tensor]:
    """A base, adapters of the projection alone as served, and PEFT's logits (T, V) of all sequences."""
    base, models = wrap_base(tiny_family(family), name=family), {-1: tiny_family(family)}
    targets = [name for name in base.spec.sites if name.endswith("kv_b_proj")]
    for own, dora in enumerate((False, True)):
        settings = {"r": 3 + 2 * own, "target_modules": targets, "use_dora": dora}
        models[own] = save_peft(tiny_family(family), folder / str(own), seed=own, **settings)
    adapters = [load_adapter(folder / str(own), base.spec, dtype=torch.float32) for own in range(2)]
    expected = [alone(models[own], tokens_T) for own, tokens_T in zip(BATCH, SEQUENCES, strict=True)]
    return base, tuple(base.served(one) for one in adapters), torch.cat(expected)


@pytest.mark.parametrize("backend", [REFERENCE, NAIVE, GROUPED, BLOCK_SPARSE, SEGMENTED], ids=str)
def test_rows_of_a_mixed_batch_equal_pefts(backend: LoraBackend, tmp_path: Path) -> None:
    base, adapters, expected = made(tmp_path)
    lora = LoraBatch(Segments(BOUNDS, BATCH), adapters, backend)
    with torch.no_grad():
        got, without = (
            base.forward(torch.cat(SEQUENCES), POSITIONS, pages_of(base), lora=one, keep=None) for one in (lora, None)
        )
    torch.testing.assert_close(got, expected, **CLOSE)
    for own, start, end in zip(BATCH, BOUNDS, BOUNDS[1:], strict=False):
        assert torch.allclose(got[start:end], without[start:end], **CLOSE) == (own == -1)


@pytest.mark.slow
def test_slots_change_the_rows_of_their_adapters(tmp_path: Path) -> None:
    """By steps of any shape, and by graphs of decode and mixed steps."""
    base, adapters, expected = made(tmp_path)
    fused = FusedBase(base, compiled=False)
    slots = AdapterSlots(fused.groups, 2, base.device, fused.exchanges, base.sites.biases)
    placed = slots.place(named(adapters))
    segments = Segments(BOUNDS, tuple(-1 if own < 0 else placed[own] for own in BATCH))
    terms: list[PreparedLora] = [slot_lora(slots, segments)]
    for rows in (8, 64):
        static = StaticSlotLora(slots, BOUNDS[-1], slots.footprint(segments), [TileCapacity(rows, 6)])
        terms.append(static.within(static.load(segments)))
    for lora in terms:
        got = fused.forward(torch.cat(SEQUENCES), POSITIONS, pages_of(base), lora=lora, keep=None)
        torch.testing.assert_close(got, expected, **CLOSE)


def test_a_compiled_layer_absorbs_too() -> None:
    """One graph for all layers of a kind, by operations that the compiler does not see through."""
    base = wrap_base(tiny_family("minicpm3"), name="minicpm3")
    with torch.no_grad():
        expected = base.forward(torch.cat(SEQUENCES), POSITIONS, pages_of(base), lora=None, keep=None)
    fused = FusedBase(base, backend=lambda graph, inputs: graph.forward)
    for _ in range(3):  # the later ones by the graph alone, without torch.compile's checks
        got = fused.forward(torch.cat(SEQUENCES), POSITIONS, pages_of(base), lora=None, keep=None)
        torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("kind", ["fp8", "nf4"])
def test_a_quantised_projection_is_absorbed_as_it_is_served(kind: str) -> None:
    """Also by compiled layers; the dequantised weight is there once, and counted."""
    model = tiny_family("minicpm3", kv_lora_rank=64, v_head_dim=12)
    quantize_layers(model, kind)
    base = wrap_base(model, name="minicpm3")
    projection = base.layers[0].get_submodule("self_attn.kv_b_proj")
    assert base.kv_shapes[0].latent and isinstance(projection, QuantizedLinear)
    with torch.no_grad():
        got, expected = (
            base.forward(torch.cat(SEQUENCES), POSITIONS, attention, lora=None, keep=None)
            for attention in (pages_of(base), PackedAttention(BOUNDS))
        )
    torch.testing.assert_close(got, expected, **CLOSE)
    sizes = config_sizes(model.config, "float32", name="minicpm3", quantization=kind)
    assert abs(sizes.weights - sum(one.nbytes for one in (*model.parameters(), *model.buffers()))) < 16  # its scalars
    compiled = FusedBase(base, backend=lambda graph, inputs: graph.forward)
    for _ in range(3):
        got = compiled.forward(torch.cat(SEQUENCES), POSITIONS, pages_of(base), lora=None, keep=None)
        torch.testing.assert_close(got, expected, **CLOSE)


def test_a_rows_bits_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    base, adapters, _ = made(tmp_path, "minicpm3")
    batch = LoraBatch(Segments(BOUNDS, BATCH), adapters, GROUPED)
    with torch.no_grad():
        together = base.forward(torch.cat(SEQUENCES), POSITIONS, pages_of(base), lora=batch, keep=None)
        for own, tokens_T, start in zip(BATCH, SEQUENCES, BOUNDS, strict=False):
            rows = len(tokens_T)
            lora = LoraBatch(Segments((0, rows), (own,)), adapters, GROUPED)
            by_itself = base.forward(tokens_T, torch.arange(rows), pages_of(base, (rows,)), lora=lora, keep=None)
            assert torch.equal(by_itself, together[start : start + rows])


def test_a_page_holds_latents_once() -> None:
    base = wrap_base(tiny_family("deepseek_v3"), name="deepseek_v3")
    config = base.model.config
    assert base.note == ""
    width = config.kv_lora_rank + config.qk_rope_head_dim
    assert base.kv_shapes == [KvShape(1, width, config.kv_lora_rank, latent=True)] * 2
    assert page_layout(base.kv_shapes, 32, torch.float32).page_bytes == 2 * 32 * width * 4
    assert base.spec.prefixes == prefix_sites([KvShape(1, 8, 8, latent=True)]) == {}, "which have no heads"


def test_a_base_without_latents_says_that_the_setting_has_no_effect() -> None:
    assert "mla_cache has no effect" in wrap_base(tiny_family("llama"), name="llama", mla_cache="heads").note
    assert "mla_cache" not in wrap_base(tiny_family("llama"), name="llama").note


@pytest.mark.parametrize("family", ["deepseek_v3", "mistral4"])
def test_heads_are_cached_where_the_setting_says_so(family: str) -> None:
    """The memory plan counts what pages hold, and layers of one size take cartridges."""
    model = tiny_family(family, qk_nope_head_dim=4, qk_rope_head_dim=8, v_head_dim=12 if family == "mistral4" else 6)
    for mla_cache in ("latents", "heads"):
        base = wrap_base(model, name=family, mla_cache=mla_cache)
        assert base.kv_shapes[0].latent == (mla_cache == "latents")
        note = "keys and values of all heads are cached, not latents (mla_cache)"
        assert (note in base.note) == (mla_cache == "heads")
        sizes = config_sizes(model.config, "float32", name=family, mla_cache=mla_cache)
        assert page_layout(base.kv_shapes, 32, torch.float32).page_bytes == 32 * sizes.kv
        assert bool(base.spec.prefixes) == (family == "mistral4" and mla_cache == "heads")
        with torch.no_grad():
            got, expected = (
                base.forward(torch.cat(SEQUENCES), POSITIONS, attention, lora=None, keep=None)
                for attention in (pages_of(base), PackedAttention(BOUNDS))
            )
        torch.testing.assert_close(got, expected, **CLOSE)


def test_a_projection_with_a_bias_is_not_absorbed() -> None:
    model = tiny_family("minicpm3")
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.bias = torch.nn.Parameter(torch.randn(layer.self_attn.kv_b_proj.out_features))
    base = wrap_base(model, name="minicpm3")
    assert not any(one.latent for one in base.kv_shapes)
    assert "not latents (a projection has a bias)" in base.note
