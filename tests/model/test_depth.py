"""The check at start of a base of many layers: rounding adds up over them, and is no defect; what is one is found at
any depth."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from coserve.core.errors import UnsupportedBase
from coserve.model import base as base_module
from coserve.model import seam
from coserve.model.base import wrap_base
from coserve.model.load import load_base
from coserve.model.lora import LoraSites
from coserve.model.parallel.mesh import Mesh
from tests.support.ranks import Ranks

HIDDEN = 64


def deep(layers: int) -> LlamaForCausalLM:
    """Random weights whose activations are those of a layer with 8,192 hidden features."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.02 * math.sqrt(8192 / HIDDEN),
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


@pytest.mark.parametrize("layers", [2, 80])
def test_rounding_of_many_random_layers_is_no_defect(layers: int) -> None:
    assert len(wrap_base(deep(layers), name="deep").layers) == layers


@pytest.mark.parametrize("layers", [2, 80])
@pytest.mark.parametrize("wrong", ["scale", "one layer's window", "rows"])
def test_what_a_seam_does_wrong_is_found(layers: int, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = seam.ReferenceAttention.attend

    def wrongly(self, layer, q_HTD, k_KTD, v_KTD, params):
        if wrong == "scale":
            q_HTD = q_HTD * 1.5
        out = attend(self, layer, q_HTD, k_KTD, v_KTD, params)
        if wrong == "rows":
            return out.roll(1, 0)
        return torch.zeros_like(out) if wrong == "one layer's window" and layer == layers - 1 else out

    monkeypatch.setattr(seam.ReferenceAttention, "attend", wrongly)
    with pytest.raises(UnsupportedBase, match=r"expected the (logits|output)"):
        wrap_base(deep(layers), name="deep")


class WithoutSums(LoraSites):
    """Sites of row-parallel modules that leave out the sum over the ranks."""

    def __init__(self, modules: dict[str, torch.nn.Module]) -> None:
        super().__init__(modules)
        for module in modules.values():
            module.coserve_site.shard = None  # type: ignore[union-attr]


def load_on_rank(mesh: Mesh, folder: str, wrong: bool) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if wrong:
            patch.setattr(base_module, "LoraSites", WithoutSums)
        try:
            load_base(folder, device="cpu", dtype="bfloat16", mesh=mesh)
        except UnsupportedBase as error:
            return error.message
    return ""


@pytest.mark.slow
def test_four_ranks_hold_many_layers_and_a_wrong_shard_is_found(tmp_path: Path) -> None:
    for layers in (2, 80):
        deep(layers).save_pretrained(tmp_path / str(layers))
    with Ranks(4) as four:
        assert four.run(load_on_rank, str(tmp_path / "80"), False) == [""] * 4
        for layers in (2, 80):
            found = four.run(load_on_rank, str(tmp_path / str(layers)), True)
            assert all("of the model's own forward" in message for message in found), layers
