"""Adapters at the base's sites: a mixed batch gives each sequence what PEFT gives it alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from coserve.core.types import LoraSettings
from coserve.finetune.init import new_adapter
from coserve.kernels.lora.segments import Segments
from coserve.lora.store.files import load_adapter
from coserve.model.base import wrap_base
from coserve.model.dropout import DropoutSpec
from coserve.model.forward_context import current, running
from coserve.model.lora import LoraBatch
from tests.support.examples import sample
from tests.support.lora_backends import GROUPED
from tests.support.lora_reference import alone, packed, save_peft, tokens_of
from tests.support.tiny_models import FAMILIES, tiny_model

LENGTHS = (5, 9, 3, 12)
ADAPTERS = (1, -1, 0, 2)
"""Of each sequence; -1 is the base alone."""


@pytest.mark.parametrize("family", sample(FAMILIES, "llama", "gpt2", "gemma3"))
def test_a_mixed_batch_equals_peft_for_each_alone(family: str, tmp_path: Path) -> None:
    plain = tiny_model(family)
    base = wrap_base(tiny_model(family), name="tiny")
    targets = list(base.spec.default_targets)
    settings: list[dict[str, object]] = [
        {"r": 3, "lora_alpha": 5, "target_modules": targets},
        {"r": 8, "lora_alpha": 8, "target_modules": targets[:1], "use_rslora": True},
        {"r": 1, "lora_alpha": 2, "target_modules": targets[1:], "rank_pattern": {targets[-1]: 5}},
    ]
    sequences = [tokens_of(length, seed) for seed, length in enumerate(LENGTHS)]
    expected, adapters = {-1: plain}, []
    for index, one in enumerate(settings):
        folder = tmp_path / str(index)
        expected[index] = save_peft(tiny_model(family), folder, seed=index, **_with_fan(family, one))
        adapters.append(load_adapter(folder, base.spec, dtype=torch.float32))
    bounds = tuple(sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1))
    batch = LoraBatch(Segments(bounds, ADAPTERS), tuple(adapters), GROUPED)
    got = packed(base, sequences, batch)
    without = packed(base, sequences)
    for adapter, mine_TV, base_TV, tokens_T in zip(ADAPTERS, got, without, sequences, strict=True):
        torch.testing.assert_close(mine_TV, alone(expected[adapter], tokens_T), rtol=1e-4, atol=1e-4)
        assert torch.equal(mine_TV, base_TV) == (adapter == -1)
        single = LoraBatch(Segments((0, len(tokens_T)), (adapter,)), tuple(adapters), GROUPED)
        assert torch.equal(mine_TV, packed(base, [tokens_T], single)[0])


def _with_fan(family: str, settings: dict[str, object]) -> dict[str, object]:
    return settings | {"fan_in_fan_out": family == "gpt2"}


def _batch(tokens: int, dropout: DropoutSpec | None = None) -> tuple[LoraBatch, torch.Tensor]:
    base = wrap_base(tiny_model("llama"), name="tiny")
    settings = LoraSettings(r=2, init="orthogonal")
    adapter = new_adapter(settings, base.spec, seed=0, dtype=torch.float32, device="cpu")
    batch = LoraBatch(Segments((0, tokens), (0,)), (adapter,), GROUPED, dropout)
    return batch, packed(base, [tokens_of(tokens)], batch)[0]


def test_dropout_is_a_function_of_its_seed() -> None:
    _, without = _batch(16)
    _, first = _batch(16, DropoutSpec(0.5, seed=1))
    _, again = _batch(16, DropoutSpec(0.5, seed=1))
    _, other = _batch(16, DropoutSpec(0.5, seed=2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, without)


def test_dropout_keeps_the_mean_and_differs_between_sites() -> None:
    x_TD = torch.ones(400, 50)
    spec = DropoutSpec(0.25, seed=7)
    dropped = spec.apply(x_TD, "a")
    torch.testing.assert_close(dropped.unique(), torch.tensor([0.0, 1 / 0.75]))
    assert abs(float(dropped.mean()) - 1) < 0.02
    assert not torch.equal(dropped, spec.apply(x_TD, "b"))


def test_the_batch_ends_with_its_forward_even_if_that_fails() -> None:
    base = wrap_base(tiny_model("llama"), name="tiny")
    adapter = new_adapter(LoraSettings(r=2), base.spec, seed=0, dtype=torch.float32, device="cpu")
    outer = LoraBatch(Segments((0, 3), (0,)), (adapter,), GROUPED)
    context = base.prepare(outer)
    with running(context):
        with pytest.raises(IndexError):
            packed(base, [torch.tensor([1 << 40])], LoraBatch(Segments((0, 1), (-1,)), (), GROUPED))
        assert current.context is context
    assert current.context.lora is None


def test_gradients_reach_the_adapter_and_nothing_else() -> None:
    base = wrap_base(tiny_model("gpt2"), name="tiny")
    settings = msgspec.structs.replace(LoraSettings(r=2, init="orthogonal"), targets=("c_attn",))
    adapter = new_adapter(settings, base.spec, seed=0, dtype=torch.float32, device="cpu")
    pairs = list(adapter.sites.values())
    for pair in pairs:
        pair.a_RD.requires_grad_()
        pair.b_OR.requires_grad_()
    batch = LoraBatch(Segments((0, 5), (0,)), (adapter,), GROUPED)
    tokens_T = tokens_of(5)
    from coserve.model.seam import ReferenceAttention

    logits = base.forward(tokens_T, torch.arange(5), ReferenceAttention((0, 5)), lora=batch, keep=None)
    logits.square().mean().backward()
    assert all(pair.a_RD.grad is not None and pair.a_RD.grad.abs().sum() > 0 for pair in pairs)
    assert all(parameter.grad is None for parameter in base.model.parameters())
