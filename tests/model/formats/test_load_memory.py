"""Memory while a quantised checkpoint is read: the weights that are loaded, and one layer's more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from coserve.model.formats.dense import open_folder
from coserve.model.formats.load import DenseModel
from coserve.model.formats.source import take_format
from coserve.model.parallel.lora import Strategy
from coserve.model.parallel.mesh import LoneRank
from coserve.model.sharded import load_shard
from tests.support import quantised
from tests.support.families import tiny_family
from tests.support.live_bytes import LiveBytes

LAYERS = 12
CPU = torch.device("cpu")


def _mxfp4(folder: Path) -> tuple[Path, Path]:
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_local_experts": 16}
    tiny_family("gpt_oss", num_hidden_layers=LAYERS, **shape).save_pretrained(folder)
    return quantised.mxfp4_experts(folder, folder)


def _fp8(folder: Path) -> tuple[Path, Path]:
    """Experts of their own tensors, which transformers merges."""
    shape = {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 8}
    tiny_family("qwen3_moe", num_hidden_layers=LAYERS, **shape).save_pretrained(folder)
    return quantised.quantise(folder, folder, quantised.fp8_rows, {"quant_method": "fbgemm_fp8"})


@pytest.mark.parametrize("mesh", [None, LoneRank(0, 2)], ids=["whole", "a rank"])
@pytest.mark.parametrize("write", [_mxfp4, _fp8])
def test_one_layer_at_most_is_dense_beside_what_is_loaded(
    write: Callable[[Path], tuple[Path, Path]], mesh: LoneRank | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The model is loaded in 16 bits, and a layer counts as it is dequantised, in float32."""
    folder, dense = write(tmp_path)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # the meter sees one thread
    with LiveBytes() as meter:
        model = _load(folder, mesh)
    assert meter.now() >= sum(parameter.nbytes for parameter in model.parameters())
    layer = (dense / "model.safetensors").stat().st_size / LAYERS
    assert meter.peak() - meter.now() < layer


def _load(folder: Path, mesh: LoneRank | None) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(folder)
    with open_folder(folder, take_format(config, folder.name), CPU) as tensors:
        if mesh is None:
            return DenseModel(config, torch.bfloat16, CPU, trust_remote_code=False).load(tensors)
        return load_shard(
            tensors,
            config,
            mesh,
            name=folder.name,
            device=CPU,
            dtype=torch.bfloat16,
            quantization="none",
            seed=0,
            strategy=Strategy.NFS,
            by_expert=False,
            trust_remote_code=False,
        ).model
