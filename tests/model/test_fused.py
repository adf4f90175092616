"""The model's layers compiled, with sites that share an input run together: against the model as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.lora.interface import PreparedLora
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import SiteGroup
from coserve.model.base import Base, wrap_base
from coserve.model.fused import FusedBase
from coserve.model.lora import LoraBatch, LoraWeights
from coserve.model.quantized.modules import quantize_layers
from tests.support.examples import in_turns
from tests.support.families import tiny_family
from tests.support.generation import adapter
from tests.support.lora_backends import GROUPED
from tests.support.tiny_models import FAMILIES, tiny_model

BOUNDS = (0, 5, 6, 16)
TOKENS, POSITIONS = torch.arange(16), torch.cat([torch.arange(n) for n in (5, 1, 10)])


def logits(base: Base, lora: LoraBatch | None = None) -> Tensor:
    with torch.no_grad():
        return base.forward(TOKENS, POSITIONS, PackedAttention(BOUNDS), lora=lora, keep=None)


def one_adapter(fused: FusedBase, weights: LoraWeights, rows: int) -> PreparedLora:
    """Its terms for all rows."""
    groups = [group for layer in fused.groups for group in layer]
    return GROUPED.prepare(Segments((0, rows), (0,)), [weights.sites], groups)


def suffixes(groups: Sequence[SiteGroup]) -> list[tuple[str, ...]]:
    return [tuple(name.rsplit(".", 1)[1] for name in group.names) for group in groups]


@pytest.mark.parametrize("family", in_turns(FAMILIES, ("llama", "gpt2", "phi3")))
def test_sites_together_give_the_models_logits(family: str) -> None:
    base = wrap_base(tiny_model(family), name=family)
    weights = adapter(base, 5, 4)
    plain = logits(base)
    adapted = logits(base, LoraBatch(Segments((0, 16), (0,)), (weights,), GROUPED))
    fused = FusedBase(base, compiled=False)
    for lora, expected in ((None, plain), (one_adapter(fused, weights, 16), adapted)):
        got = fused.forward(TOKENS, POSITIONS, PackedAttention(BOUNDS), lora=lora, keep=None)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(base), plain)
    fused.check()


def test_groups_are_seen_not_named() -> None:
    llama = FusedBase(wrap_base(tiny_model("llama"), name="llama"), compiled=False)
    assert [suffixes(layer) for layer in llama.groups] == [
        [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)]
    ] * 2
    gpt2 = FusedBase(wrap_base(tiny_model("gpt2"), name="gpt2"), compiled=False)
    assert suffixes(gpt2.groups[0]) == [("c_attn",), ("c_proj",), ("c_fc",), ("c_proj",)]


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_more_sites_of_one_input_than_a_group_takes_are_one_product(quantization: str | None) -> None:
    """Each group with its own terms: adapters of all sites, and of one site of the last group alone."""
    model = tiny_family("qwen3_5_text")
    if quantization is not None:
        quantize_layers(model, quantization)
    base = wrap_base(model, name="qwen3_5")
    weights, plain = adapter(base, 5, 4), logits(base)
    fused = FusedBase(base, compiled=False)
    layer = suffixes(fused.groups[0])
    assert layer[:3] == [("in_proj_qkv", "in_proj_z", "in_proj_b"), ("in_proj_a",), ("out_proj",)]
    first, second = (base.sites.shared_by_site()[group.names[0]] for group in fused.groups[0][:2])
    assert first.whole is not None and second.whole is None
    assert len(fused.stacked) == sum(len(one) - (("in_proj_a",) in suffixes(one)) for one in fused.groups)
    for one in (first, second):
        start = 0 if one is first else sum(first.sizes)
        part = first.whole.weight[start : start + sum(one.sizes)]
        assert part.data_ptr() == one.stacked.weight.data_ptr(), "a weight is in memory twice"
        assert torch.equal(part, one.stacked.weight)
    alone = LoraWeights(weights.settings, {name: one for name, one in weights.sites.items() if "in_proj_a" in name})
    tolerance = {"rtol": 1e-4, "atol": 1e-4}
    attention = PackedAttention(BOUNDS)
    torch.testing.assert_close(fused.forward(TOKENS, POSITIONS, attention, lora=None, keep=None), plain, **tolerance)
    for own in (weights, alone):
        adapted = logits(base, LoraBatch(Segments((0, 16), (0,)), (own,), GROUPED))
        assert not torch.allclose(adapted, plain, **tolerance)
        got = fused.forward(TOKENS, POSITIONS, attention, lora=one_adapter(fused, own, 16), keep=None)
        torch.testing.assert_close(got, adapted, **tolerance)


def test_conv1d_weights_lie_as_linear_ones_do() -> None:
    """Their modules are what they were: shape, values, gradient-free parameters."""
    base = wrap_base(tiny_model("gpt2"), name="gpt2")
    before = {name: parameter.clone() for name, parameter in base.model.named_parameters()}
    FusedBase(base, compiled=False)
    for shared in base.sites.shared():
        assert shared.stacked.weight.is_contiguous()
        assert shared.stacked.weight.shape[0] == sum(shared.sizes)
        module = base.model.get_submodule(shared.group.names[0])
        assert module.weight.data_ptr() == shared.stacked.weight.data_ptr(), "a weight is in memory twice"
        assert torch.equal(module.weight.T, shared.stacked.weight)
    assert all(torch.equal(parameter, before[name]) for name, parameter in base.model.named_parameters())


@pytest.mark.parametrize("family", in_turns(["gemma2", "gpt2", "phi3"], ["gpt2"], days=2))
def test_one_graph_serves_all_layers_of_a_kind(family: str) -> None:
    """Traced, with no code generated: layers of any index, batches of any size, with adapters and without."""
    base = wrap_base(tiny_model(family, **({} if family.startswith("g") else {"num_hidden_layers": 5})), name=family)
    weights, plain = adapter(base, 5, 4), logits(base)
    traced = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> object:
        traced.append(graph)
        return graph.forward

    fused = FusedBase(base, backend=backend)
    got = fused.forward(TOKENS, POSITIONS, PackedAttention(BOUNDS), lora=None, keep=None)
    torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-4)
    kinds = 2 if family == "gemma2" else 1
    assert len(traced) == kinds
    for rows in (9, 4):
        lora = one_adapter(fused, weights, rows) if rows == 4 else None
        fused.forward(TOKENS[:rows], POSITIONS[:rows], PackedAttention((0, rows)), lora=lora, keep=torch.tensor([1]))
    assert len(traced) == kinds
    fused.forward(TOKENS[:1], POSITIONS[:1], PackedAttention((0, 1)), lora=None, keep=None)
    assert len(traced) <= 2 * kinds


def plainly(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Sequence[object]]:
    return graph.forward


def counted_calls(base: Base, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers that are called through torch.compile from now on."""
    asked, compile = list[int](), torch.compile

    def counted(forward: Callable[..., object], **options: object) -> Callable[..., object]:
        compiled = compile(forward, **options)

        def call(layer: nn.Module, *args: object, **given: object) -> object:
            asked.append([*base.layers].index(layer))
            return compiled(layer, *args, **given)

        return call

    monkeypatch.setattr(torch, "compile", counted)
    return asked


@pytest.mark.parametrize("family", in_turns(["llama", "gemma2"], days=2))
def test_torch_compile_is_asked_once_a_kind_of_layer(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once layers are bound to graphs: with the same logits, whatever the rows, and with adapters."""
    base = wrap_base(tiny_model(family, **({} if family.startswith("g") else {"num_hidden_layers": 5})), name=family)
    weights, asked = adapter(base, 5, 4), counted_calls(base, monkeypatch)
    fused, slow = FusedBase(base, backend=plainly), FusedBase(base, compiled=False)

    def run(runner: FusedBase, rows: int, lora: LoraWeights | None, start: int = 0) -> Tensor:
        tokens, positions = torch.arange(start, start + rows), torch.arange(start, start + rows)
        term = None if lora is None else one_adapter(runner, lora, rows)
        return runner.forward(tokens, positions, PackedAttention((0, rows)), lora=term, keep=None)

    for rows in (13, 5, 1, 1):
        run(fused, rows, None)
    kinds = 2 if family == "gemma2" else 1
    for rows in (2, 16, 1, 5, 5, 1):
        for lora in (None, weights):
            asked.clear()
            got = run(fused, rows, lora, start=rows)
            assert asked == list(range(kinds)), rows
            torch.testing.assert_close(got, run(slow, rows, lora, start=rows), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_graph_that_is_new_is_made_for_all_layers() -> None:
    """One row after many: layers that are bound to the graph of many must not take it."""
    base = wrap_base(tiny_model("llama"), name="llama")
    fused = FusedBase(base, backend=plainly)
    for rows in (13, 5, 4, 1):
        got = fused.forward(TOKENS[:rows], TOKENS[:rows], PackedAttention((0, rows)), lora=None, keep=None)
        with torch.no_grad():
            expected = base.run(TOKENS[:rows], TOKENS[:rows], PackedAttention((0, rows)), None)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", in_turns(["gemma4_text", "gemma3n_text"], ["gemma4_text"], days=2))
@pytest.mark.slow
def test_layers_that_read_others_keys_and_values_are_bound(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They get them anew in every step. Layers that others read always run through torch.compile, which hands their
    keys and values on."""
    base = wrap_base(tiny_family(family), name=family)
    asked = counted_calls(base, monkeypatch)
    weights, fused = adapter(base, 5, 4), FusedBase(base, backend=plainly)
    for rows in (13, 5, 1, 1, 2, 16, 1, 4):
        for own in (None, weights):
            asked.clear()
            tokens, attention = torch.arange(rows, 2 * rows), PackedAttention((0, rows))
            lora = None if own is None else LoraBatch(Segments((0, rows), (0,)), (own,), GROUPED)
            with torch.no_grad():
                expected = base.forward(tokens, TOKENS[:rows], attention, lora=lora, keep=None)
            term = None if own is None else one_adapter(fused, own, rows)
            got = fused.forward(tokens, TOKENS[:rows], attention, lora=term, keep=None)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    if family == "gemma4_text":  # Gemma 3n's graphs take multiples of the rows, too
        assert asked == [0, 1, 2, 3, 5], "layer 4 reads what layer 3 reads"
