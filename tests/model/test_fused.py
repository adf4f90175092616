"""The model's layers compiled, with sites that share an input run together: against the model as it is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from coserve.kernels.attention import PackedAttention
from coserve.kernels.dispatch import Way
from coserve.kernels.segments import LoraPair, Segments
from coserve.model.base import Base, wrap_base
from coserve.model.fused import FusedBase
from coserve.model.lora import LoraBatch, LoraWeights
from coserve.types import LoraSettings
from tests.support.tiny_models import FAMILIES, tiny_model

BOUNDS = (0, 5, 6, 16)
TOKENS, POSITIONS = torch.arange(16), torch.cat([torch.arange(n) for n in (5, 1, 10)])


def logits(base: Base, lora: LoraBatch | None = None) -> Tensor:
    with torch.no_grad():
        return base.forward(TOKENS, POSITIONS, PackedAttention(BOUNDS), lora=lora, keep=None)


class Loop:
    """The LoRA terms of one adapter for all rows, plainly."""

    def __init__(self, fused: FusedBase, weights: LoraWeights) -> None:
        self._fused, self._weights = fused, weights

    def add_(self, layer: int, group: int, ys: Sequence[Tensor], x_TD: Tensor) -> None:
        for name, y in zip(self._fused.groups[layer][group], ys, strict=True):
            pair = self._weights.sites[name]
            y += pair.scaling * (x_TD @ pair.a_RD.T) @ pair.b_OR.T


def adapter(base: Base) -> LoraWeights:
    g = torch.Generator().manual_seed(5)
    sites = {
        name: LoraPair(torch.randn(4, s.in_features, generator=g), torch.randn(s.out_features, 4, generator=g), 0.1)
        for name, s in base.spec.sites.items()
    }
    return LoraWeights(LoraSettings(r=4), sites)


def suffixes(groups: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [tuple(name.rsplit(".", 1)[1] for name in group) for group in groups]


@pytest.mark.parametrize("family", FAMILIES)
def test_sites_together_give_the_models_logits(family: str) -> None:
    base = wrap_base(tiny_model(family), name=family)
    weights = adapter(base)
    plain = logits(base)
    adapted = logits(base, LoraBatch(Segments((0, 16), (0,)), (weights,), Way.GROUPED))
    fused = FusedBase(base, compiled=False)
    for lora, expected in ((None, plain), (Loop(fused, weights), adapted)):
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


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "phi3"])
def test_one_graph_serves_all_layers_of_a_kind(family: str) -> None:
    """Traced, with no code generated: layers of any index, batches of any size, with adapters and without."""
    base = wrap_base(tiny_model(family, **({} if family.startswith("g") else {"num_hidden_layers": 5})), name=family)
    weights, plain = adapter(base), logits(base)
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
        lora = Loop(fused, weights) if rows == 4 else None
        fused.forward(TOKENS[:rows], POSITIONS[:rows], PackedAttention((0, rows)), lora=lora, keep=torch.tensor([1]))
    assert len(traced) == kinds
    fused.forward(TOKENS[:1], POSITIONS[:1], PackedAttention((0, 1)), lora=None, keep=None)
    assert len(traced) <= 2 * kinds
