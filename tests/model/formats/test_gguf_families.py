"""GGUF files of families that transformers has no table of, written here as llama.cpp's converter writes them: the
loaded model's parameters and logits are those of the model that was written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import MODEL_ARCH
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from coserve.model.base import load_base
from tests.support.families import tiny_family
from tests.support.gguf_files import write_by_names

Stored = dict[str, Tensor]
Change = Callable[[str, Tensor], Stored]


def _split(tensor: Tensor, gate: str, up: str) -> Stored:
    half = tensor.shape[-2] // 2
    return {gate: tensor[..., :half, :], up: tensor[..., half:, :]}


def _experts(name: str, tensor: Tensor) -> Stored:
    """Experts stacked as transformers keeps them, gates and ups apart."""
    block = f"blk.{name.split('.')[2]}" if "layers" in name else ""
    if name.endswith("experts.gate_up_proj"):
        return _split(tensor, f"{block}.ffn_gate_exps.weight", f"{block}.ffn_up_exps.weight")
    if name.endswith(("experts.down_proj", "experts.up_proj")):
        return {f"{block}.ffn_{name.split('.')[-1].removesuffix('_proj')}_exps.weight": tensor}
    if name.endswith("e_score_correction_bias"):
        return {f"{block}.exp_probs_b.bias": tensor}
    return {}


def _check(path: Path, model: PreTrainedModel, architecture: MODEL_ARCH, change: Change, **metadata: object) -> None:
    """Write the model, load it, and compare parameters, logits and settings."""
    config = model.config
    given: dict[str, object] = {"attention__head_count_kv": config.num_key_value_heads}
    given |= {"attention__layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", 1e-5)}
    given |= {"attention__key_length": config.head_dim} if getattr(config, "head_dim", None) else {}
    given |= {"feed_forward_length": getattr(config, "intermediate_size", 0)} | metadata
    write_by_names(path, model, architecture, change=change, **given)  # type: ignore[arg-type]
    found = load_base(str(path), device="cpu", dtype="auto").model
    assert found.config.model_type == config.model_type
    written = found.state_dict()
    for name, parameter in model.state_dict().items():
        torch.testing.assert_close(written[name], parameter, msg=lambda text, name=name: f"{name}: {text}")
    plain = AutoModelForCausalLM.from_config(found.config, dtype=torch.float32, attn_implementation="eager").eval()
    plain.load_state_dict(found.state_dict())
    ids = torch.arange(1, 25)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["olmo2", "olmo3"])
def test_olmo(family: str, tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    model = tiny_family(family, **({"layer_types": kinds} if family == "olmo3" else {}))
    windows = {"attention__sliding_window": 5, "attention__sliding_window_pattern": [True, False]}
    _check(tmp_path / "m.gguf", model, MODEL_ARCH.OLMO2, _experts, **(windows if family == "olmo3" else {}))


@pytest.mark.parametrize("biased", [True, False])
def test_seed_oss(biased: bool, tmp_path: Path) -> None:
    model = tiny_family("seed_oss", attention_bias=biased)
    _check(tmp_path / "m.gguf", model, MODEL_ARCH.SEED_OSS, _experts)
