"""The longest sequence that a base can serve, from its rotary scaling, and a note where the model claims more."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from coserve.core.errors import UnsupportedBase


@dataclass(frozen=True)
class Context:
    tokens: int
    """Length of the longest sequence whose logits do not depend on other sequences, in tokens."""
    note: str = ""
    """Why `tokens` is less than the model's own context; empty if it is not."""


def context_of(config: PretrainedConfig, *, least: int) -> Context:
    """Return the context of a config, by its type of rotary scaling.

    - default, linear, llama3, proportional: the frequencies are fixed, up to `max_position_embeddings`.
    - yarn (Peng et al., ICLR '24): fixed too, up to `factor` times the original context: published configs often keep
      `max_position_embeddings` at the original.
    - longrope (Ding et al., ICML '24) and dynamic: beyond the original context transformers changes the frequencies of
      all sequences of a batch by the longest of them, short ones and cached keys too. We stay within it and say so.

    Raises `UnsupportedBase` for less than `least` tokens.
    """
    text = config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    if not isinstance(context, int) or context < least:
        raise UnsupportedBase(f"{config.model_type}: expected a context of at least {least} tokens, got {context}")
    rotary = getattr(text, "rope_parameters", None) or {}
    found = [
        _limit(one, context) for one in [value for value in rotary.values() if isinstance(value, dict)] or [rotary]
    ]
    return min(found, key=lambda one: one.tokens)


def _limit(rotary: dict[str, object], context: int) -> Context:
    """Return the limit of one type of layer."""
    kind, factor = rotary.get("rope_type"), rotary.get("factor")
    original = rotary.get("original_max_position_embeddings")
    stretched = context
    if isinstance(factor, int | float) and factor > 1:
        stretched = int(factor * (original if isinstance(original, int) else context))
    if kind == "yarn":
        return Context(max(context, stretched))
    if kind == "longrope" and isinstance(original, int) and original < context:
        return Context(original, _note("longrope", original, context))
    if kind == "dynamic" and stretched > context:
        return Context(context, _note("dynamic", context, stretched))
    return Context(context)


def _note(kind: str, served: int, full: int) -> str:
    return (
        f"context: the base serves {served} of its {full} tokens: beyond them its rotary scaling ({kind}) "
        "would change the other sequences of a batch"
    )


@torch.no_grad()
def fix_frequencies(model: nn.Module, device: torch.device) -> None:
    """Keep the rotary frequencies that hold up to the served context (`context_of`).

    For longrope and dynamic, transformers chooses them in each forward by the batch's last position. The host would
    wait for the device to read it, so no CUDA graph could be captured. PhiMoE also computes them anew, on the host.
    """
    module: Any
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if hasattr(module, "rope_init_fn"):
            config, (frequencies, scale) = copy.copy(module.config), module.rope_init_fn(module.config)
            scale = config.rope_parameters.get("short_mscale", scale)
            config.rope_parameters = config.rope_parameters | {"rope_type": "default"}
            module.register_buffer("inv_freq", frequencies.to(device), persistent=False)
            module.config, module.rope_init_fn = config, partial(_fixed, module, scale)
        if isinstance(kind, str):
            module.rope_type = _FIXED.get(kind, kind)
        elif isinstance(kind, dict):
            module.rope_type = {layers: _FIXED.get(own, own) for layers, own in kind.items()}


_FIXED = dict.fromkeys(("longrope", "dynamic"), "default")
"""The types of scaling, as modules have them, that are replaced, and what replaces them."""


def _fixed(module: nn.Module, scale: float, config: PretrainedConfig) -> tuple[Tensor, float]:
    """Replaces the `rope_init_fn` of a module whose frequencies are kept."""
    return module.get_buffer("inv_freq"), scale
