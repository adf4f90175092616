"""Checkpoints as quantisers write them are served as the dense model that their definition gives."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaForCausalLM

from coserve.core.errors import UnsupportedBase
from coserve.model.base import Base
from coserve.model.formats.load import DenseModel
from coserve.model.formats.source import FORMATS
from coserve.model.load import load_base
from coserve.model.parallel.mesh import LoneRank
from tests.support import quantised
from tests.support.families import tiny_family

GROUPS = {"symmetric": False, "group_size": 16, "strategy": "group"}


def _compressed(layout: str, **weights: object) -> dict[str, object]:
    """The status is llm-compressor's of 2024; later it is "compressed"."""
    scheme = {"targets": ["Linear"], "weights": weights}
    settings = {"format": layout, "quantization_status": "frozen", "config_groups": {"group_0": scheme}}
    return {"quant_method": "compressed-tensors"} | settings


KINDS: dict[str, tuple[quantised.Quantise, dict[str, object]]] = {
    "fp8": (quantised.fp8_blocks, {"quant_method": "fp8", "weight_block_size": [24, 20]}),
    "fbgemm_fp8": (quantised.fp8_rows, {"quant_method": "fbgemm_fp8"}),
    "compressed-tensors, channel": (quantised.fp8_rows, _compressed("float-quantized", num_bits=8)),
    "compressed-tensors, tensor": (quantised.fp8_tensor, _compressed("float-quantized", num_bits=8)),
    "compressed-tensors, packed": (quantised.packed_groups, _compressed("pack-quantized", num_bits=4, **GROUPS)),
    "compressed-tensors, actorder": (quantised.packed_reordered, _compressed("pack-quantized", num_bits=4)),
    "awq": (quantised.awq, {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}),
    "gptq": (quantised.gptq(4, 1, reordered=True), {"quant_method": "gptq", "bits": 4, "desc_act": True}),
    "gptq, version 2": (
        quantised.gptq(8, 2, reordered=False),
        {"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"},
    ),
}


def _load(folder: Path, **settings: object) -> Base:
    return load_base(str(folder), device="cpu", dtype="auto", **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_family("llama").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_definition(kind: str, llama: Path, tmp_path: Path) -> None:
    found, dense = quantised.quantise(llama, tmp_path, *KINDS[kind])
    base, expected = _load(found), _load(dense)
    weights = expected.model.state_dict()
    for name, weight in base.model.state_dict().items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-6, atol=1e-8)
    assert base.note == f"the base's weights are dequantised from {kind.split(',')[0]} at load"
    assert base.model.config.to_dict().get("quantization_config") is None
    part, whole = (_load(folder, mesh=LoneRank(1, 2)) for folder in (found, dense))
    weights = whole.model.state_dict()
    for name, weight in part.model.state_dict().items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-6, atol=1e-8)
    assert part.note == base.note


@pytest.mark.parametrize(
    ("make", "settings", "dropped"),
    [
        (quantised.auto_fp8, {"quant_method": "fp8"}, ()),
        (quantised.packed_zeros_in_bytes, _compressed("pack-quantized", num_bits=4, **GROUPS), ()),
        (quantised.gptq(4, 2, reordered=True), {"quant_method": "gptq", "bits": 4, "format": "gptq_v2"}, ()),
        (quantised.gptq(4, 1, reordered=False), {"quant_method": "gptq", "bits": 4}, (".g_idx",)),
        (
            quantised.gptq(4, 1, reordered=False, size=32),  # of 48 inputs, the last group is smaller
            {"quant_method": "gptq", "bits": 4, "group_size": 32},
            (".g_idx",),
        ),
    ],
)
def test_other_spellings_of_a_format(
    make: quantised.Quantise, settings: dict[str, object], dropped: tuple[str, ...]
) -> None:
    form = FORMATS[str(settings["quant_method"])](settings)
    stored, weight = make(24, 48, torch.Generator().manual_seed(0))
    names = {suffix.removeprefix("" if form.main else ".weight"): suffix for suffix in stored if suffix not in dropped}
    parts = {name: stored[suffix] for name, suffix in names.items() if name in (form.main, *form.others)}
    torch.testing.assert_close(form.dequantize(parts), weight.float(), rtol=1e-6, atol=1e-8)


def test_scales_of_activations_are_refused(tmp_path: Path) -> None:
    """AutoAWQ's files of StarCoder 2 and GPT-NeoX divide what an activation returns by `act.scales`."""
    tiny_family("starcoder2").save_pretrained(tmp_path)
    found, _ = quantised.quantise(tmp_path, tmp_path, *KINDS["awq"])
    tensors = load_file(found / "model.safetensors")
    save_file(tensors | {"model.layers.0.mlp.act.scales": torch.full((48,), 2.0)}, found / "model.safetensors")
    with pytest.raises(UnsupportedBase, match=r"mlp.act.scales has no .*mlp.act.qweight; awq is read only where"):
        _load(found)


@pytest.mark.parametrize("mesh", [None, LoneRank(1, 2)])
def test_mxfp4_experts_are_those_of_transformers(mesh: LoneRank | None, tmp_path: Path) -> None:
    """gpt-oss's files: `_blocks` and `_scales` in place of a parameter."""
    tiny_family("gpt_oss", hidden_size=64, intermediate_size=32).save_pretrained(tmp_path)
    base, expected = (_load(folder, mesh=mesh) for folder in quantised.mxfp4_experts(tmp_path, tmp_path))
    assert base.note == "the base's weights are dequantised from mxfp4 at load"
    weights = expected.model.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in base.model.state_dict().items())


def test_experts_of_their_own_files_are_merged(tmp_path: Path) -> None:
    """A mixture of experts in FP8 has a weight and a scale for each expert."""
    tiny_family("qwen3_moe").save_pretrained(tmp_path)
    found, dense = quantised.quantise(tmp_path, tmp_path, *KINDS["fp8"])
    assert any(".experts.1." in name for name in load_file(found / "model.safetensors"))
    base, expected = _load(found), _load(dense)
    assert base.spec.fingerprint == expected.spec.fingerprint


@pytest.mark.parametrize("mesh", [None, LoneRank(1, 2)])
def test_stacked_experts_have_scales_of_their_own(mesh: LoneRank | None, tmp_path: Path) -> None:
    """As Mistral 4's: one tensor for all experts of a layer, and a scale for each expert."""
    tiny_family("qwen3_vl_moe").save_pretrained(tmp_path)
    base, expected = (_load(folder, mesh=mesh) for folder in quantised.fp8_experts(tmp_path, tmp_path))
    weights = expected.model.state_dict()
    for name, weight in base.model.state_dict().items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"quant_method": "bitsandbytes"}, r"quantised by 'bitsandbytes'; coserve reads awq, .*dequantize\(\)"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq: expected version 'gemm' with 4 bits, got 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "format": "gemv"}, "awq: expected version 'gemm' with 4 bits, got 'gemv'"),
        ({"quant_method": "gptq", "bits": 3}, "gptq: expected 2, 4 or 8 bits"),
        (_compressed("nvfp4-pack-quantized", num_bits=4), "compressed-tensors: nvfp4-pack-quantized with 4 bits"),
        ({"quant_method": "gptq", "bits": 4}, "config says gptq, but no weight is stored so"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    settings: dict[str, object], reason: str, llama: Path, tmp_path: Path
) -> None:
    save_file(load_file(llama / "model.safetensors"), tmp_path / "model.safetensors")
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(UnsupportedBase, match=reason):
        _load(tmp_path)


@pytest.mark.parametrize("mesh", [None, LoneRank(0, 2)])
def test_a_weight_without_its_scales_is_refused(llama: Path, tmp_path: Path, mesh: LoneRank | None) -> None:
    found, _ = quantised.quantise(llama, tmp_path, *KINDS["awq"])
    tensors = load_file(found / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.scales"]
    save_file(tensors, found / "model.safetensors")
    with pytest.raises(UnsupportedBase, match=r"up_proj.weight has no .scales, which awq needs"):
        _load(found, mesh=mesh)


def test_dense_weights_beside_scales_are_refused(llama: Path, tmp_path: Path) -> None:
    """Calibrated but not compressed: scales would be applied to what is no quantised number."""
    found, _ = quantised.quantise(llama, tmp_path, *KINDS["compressed-tensors, channel"])
    tensors = load_file(found / "model.safetensors")
    weight = tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors | {"model.layers.1.mlp.up_proj.weight": weight.float()}, found / "model.safetensors")
    with pytest.raises(UnsupportedBase, match=r"up_proj.weight cannot be read .* expected 8-bit numbers"):
        _load(found)


def test_on_a_gpu_each_weight_is_placed_as_it_is_read(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks accelerate to, so that is a dependency: without it all would lie in host memory first."""
    given: dict[str, object] = {}

    def load(*_: object, **settings: object) -> None:
        given.update(settings)
        raise UnsupportedBase("loaded")

    device = torch.device("cuda", 0)
    dense = DenseModel(AutoConfig.from_pretrained(llama), torch.bfloat16, device, trust_remote_code=False)
    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", load)
    with pytest.raises(UnsupportedBase, match="loaded"):
        dense.load({})
    assert given["device_map"] == device
    needed = tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]
    assert any(each.startswith("accelerate") for each in needed)
