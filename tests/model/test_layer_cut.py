"""Layer by layer equals the model's own forward: logits and gradients, with adapters."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from coserve.core.errors import UnsupportedBase
from coserve.core.types import LoraSettings
from coserve.finetune.init import new_adapter
from coserve.kernels.lora.segments import Segments
from coserve.model.base import Base, wrap_base
from coserve.model.dropout import DropoutSpec
from coserve.model.forward_context import running
from coserve.model.layers import LayerCut
from coserve.model.lora import LoraBatch
from coserve.model.seam import ReferenceAttention
from tests.support.examples import sample
from tests.support.lora_backends import GROUPED
from tests.support.lora_reference import tokens_of
from tests.support.tiny_models import FAMILIES, tiny_model

BOUNDS = (0, 9, 14)


def _batch(base: Base, dropout: float = 0.0) -> tuple[LoraBatch, list[torch.Tensor]]:
    settings = LoraSettings(r=4, init="orthogonal")
    adapter = new_adapter(settings, base.spec, seed=1, dtype=torch.float32, device="cpu")
    weights = [tensor.requires_grad_() for pair in adapter.sites.values() for tensor in (pair.a_RD, pair.b_OR)]
    spec = DropoutSpec(dropout, seed=3) if dropout else None
    return LoraBatch(Segments(BOUNDS, (0, 0)), (adapter,), GROUPED, spec), weights


def _packed() -> tuple[torch.Tensor, torch.Tensor, ReferenceAttention]:
    positions_T = torch.cat([torch.arange(end - start) for start, end in pairwise(BOUNDS)])
    return tokens_of(BOUNDS[-1]), positions_T, ReferenceAttention(BOUNDS)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("family", sample(FAMILIES, "llama", "gpt2", "gemma2", "phi3"))
def test_logits_and_gradients_equal_the_whole_forwards(family: str, dropout: float) -> None:
    base = wrap_base(tiny_model(family), name="tiny")
    cut, keep = LayerCut(base), torch.tensor([2, 8, 13])
    batch, weights = _batch(base, dropout)
    tokens_T, positions_T, attention = _packed()
    with running(base.prepare(batch)):
        want_KV = base.run(tokens_T, positions_T, attention, keep)
        expected = torch.autograd.grad(want_KV.square().sum(), weights)
        inputs = cut.embed(tokens_T, positions_T, attention)
        h_1TD = inputs.h_1TD
        for i in range(len(base.layers)):
            h_1TD = cut.layer(i, h_1TD, inputs)
        got_KV = cut.head(h_1TD[:, keep], inputs, keep)
        got = torch.autograd.grad(got_KV.square().sum(), weights)
    torch.testing.assert_close(got_KV, want_KV, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_layers_are_the_models_own_again_afterwards() -> None:
    base = wrap_base(tiny_model("llama"), name="tiny")
    cut = LayerCut(base)
    with pytest.raises(IndexError):
        cut.embed(torch.tensor([1, 1 << 40]), torch.tensor([0, 1]), ReferenceAttention((0, 2)))
    assert not any("forward" in layer.__dict__ for layer in base.layers)


def test_pieces_of_two_batches_may_interleave() -> None:
    base = wrap_base(tiny_model("gemma2"), name="tiny")
    cut = LayerCut(base)
    batches = [(tokens_of(length, length), torch.arange(length), ReferenceAttention((0, length))) for length in (12, 7)]
    with torch.no_grad():
        inputs = [cut.embed(*batch) for batch in batches]
        hidden = [one.h_1TD for one in inputs]
        for i in range(len(base.layers)):
            hidden = [cut.layer(i, h_1TD, one) for h_1TD, one in zip(hidden, inputs, strict=True)]
        for (tokens_T, positions_T, attention), h_1TD, one in zip(batches, hidden, inputs, strict=True):
            got_TV = cut.head(h_1TD, one, torch.arange(len(tokens_T)))
            torch.testing.assert_close(got_TV, base.run(tokens_T, positions_T, attention, None))


def test_a_model_that_works_between_its_layers_is_refused() -> None:
    model = tiny_model("llama")
    base = wrap_base(model, name="tiny")
    model.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] + torch.arange(32), *args[1:]))
    # A hook stands for a model's own arithmetic between two layers: it runs in `embed`, in `layer` and in `head`.
    with pytest.raises(UnsupportedBase, match="layer by layer"):
        LayerCut(base)
