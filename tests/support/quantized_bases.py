"""A tiny base whose sizes FP8 and NF4 allow, quantised, and the same model with its dequantised weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from coserve.model.base import Base
from coserve.model.load import load_base
from coserve.model.quantized.modules import QuantizedLinear
from tests.support.families import tiny_family

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def save_base(folder: Path, family: str = "llama", **overrides: object) -> Path:
    tiny_family(family, **SIZES, **overrides).save_pretrained(folder)
    return folder


def load(folder: Path, quantization: str = "none", *, device: str = "cpu") -> Base:
    return load_base(str(folder), device=device, dtype="auto", quantization=quantization)


def dequantized(folder: Path, base: Base) -> PreTrainedModel:
    """The model of the files, plain, with a quantised base's weights."""
    plain = tiny_family(base.spec.family, **SIZES)
    plain.load_state_dict(load(folder).model.state_dict())
    with torch.no_grad():
        for name, module in base.model.named_modules():
            if isinstance(module, QuantizedLinear):
                plain.get_submodule(name).weight.copy_(module.weight)
    return plain
