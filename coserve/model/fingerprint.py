"""A base's fingerprint, which identifies the weights that an adapter was trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PretrainedConfig, PreTrainedModel

_WHOLE = 1 << 26
"""Most elements (64 million) of a base that is hashed in full."""
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
    parameters = dict(model.named_parameters())
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    return fingerprint_of(model.config, shapes, lambda name: parameters[name].detach(), model.dtype)


def fingerprint_of(
    config: PretrainedConfig, shapes: Mapping[str, torch.Size], read: Callable[[str], Tensor], dtype: torch.dtype
) -> str:
    """Return the `fingerprint` of a base that is loaded in `dtype`. `read` returns the parameter of a name."""
    digest = hashlib.sha256()
    digest.update(json.dumps([config.model_type, _rotary(config)], sort_keys=True).encode())
    whole = sum(shape.numel() for shape in shapes.values()) <= _WHOLE
    for name in sorted(shapes):
        digest.update(f"\0{name}{tuple(shapes[name])}".encode())
        flat = read(name).reshape(-1)
        if not whole and flat.numel() > _SAMPLE:
            flat = flat[:: flat.numel() // _SAMPLE]
        digest.update(flat.to(dtype).to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()


def _rotary(config: PretrainedConfig) -> object:
    """Return the rotary settings, which weights don't show."""
    settings = getattr(config.get_text_config(), "rope_parameters", None)
    return json.loads(json.dumps(settings, sort_keys=True, default=str))


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor, or the one that a parameter wraps, is fake."""
    return isinstance(tensor, FakeTensor)
