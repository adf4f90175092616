"""A base's fingerprint, which identifies the weights that an adapter was trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PretrainedConfig, PreTrainedModel

WHOLE = 1 << 26
"""Most elements (64 million) of a base that is hashed in full."""
ORIGINAL = "original"
"""Attribute of a quantised module: its original weight's `thinned` elements. Removed once they are hashed, so that a
base has one fingerprint however it is quantised."""
_SAMPLE = 1 << 14
"""Evenly spaced elements that are hashed of each tensor of larger bases."""


def fingerprint(model: PreTrainedModel) -> str:
    """Return the SHA-256 (hex) of the family, the rotary settings and the weights; empty for fake weights.

    Weights are hashed as bfloat16, so that a base has one fingerprint whether it is loaded in float32 or bfloat16. A
    base published in float32 or bfloat16 and loaded in float16 may get another one. Up to 64 million elements all are
    hashed. Larger bases are sampled, 16 384 evenly spaced elements of each tensor: fine-tuning moves nearly all
    elements, so two bases that differ collide only if one was edited by hand in a few places.
    """
    if is_fake(next(model.parameters())):
        return ""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    for path, module in model.named_modules():
        if isinstance(original := getattr(module, ORIGINAL, None), Tensor):
            parameters[f"{path}.weight"] = original
            shapes[f"{path}.weight"] = torch.Size((module.out_features, module.in_features))
            delattr(module, ORIGINAL)
    return fingerprint_of(model.config, shapes, lambda name: parameters[name].detach(), model.dtype)


def fingerprint_of(
    config: PretrainedConfig, shapes: Mapping[str, torch.Size], read: Callable[[str], Tensor], dtype: torch.dtype
) -> str:
    """Return the `fingerprint` of a base that is loaded in `dtype`. `read` returns the parameter of a name."""
    digest = hashlib.sha256()
    digest.update(json.dumps([config.model_type, _rotary(config)], sort_keys=True).encode())
    whole = sum(shape.numel() for shape in shapes.values()) <= WHOLE
    for name in sorted(shapes):
        digest.update(f"\0{name}{tuple(shapes[name])}".encode())
        digest.update(
            thinned(read(name), whole=whole).to(dtype).to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes()
        )
    return digest.hexdigest()


def thinned(tensor: Tensor, *, whole: bool) -> Tensor:
    """Return the elements of a tensor that are hashed, flat. A tensor that is thinned already is returned whole.
    `whole`: whether the base has at most `WHOLE` elements."""
    flat = tensor.reshape(-1)
    return flat if whole or flat.numel() <= _SAMPLE else flat[:: flat.numel() // _SAMPLE].clone()


def _rotary(config: PretrainedConfig) -> object:
    """Return the rotary settings, which weights don't show."""
    settings = getattr(config.get_text_config(), "rope_parameters", None)
    return json.loads(json.dumps(settings, sort_keys=True, default=str))


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor, or the one that a parameter wraps, is fake."""
    return isinstance(tensor, FakeTensor)
