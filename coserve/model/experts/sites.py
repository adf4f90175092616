"""Finds the fused parameters of experts in a transformers model, and hooks their modules to add LoRA terms.

transformers' experts, whatever their family, hold one 3-D parameter for gate and up, and one for down, and describe
their layout by attributes that its decorator sets (`use_experts_implementation`).
"""

from __future__ import annotations

from types import MethodType
from typing import cast

import torch
from torch import Tensor, nn

from coserve.core.types import Halves, SiteSpec
from coserve.model.experts.forward import SITES, experts_forward, traced_forward
from coserve.model.forward_context import current


def expert_sites(model: nn.Module, path: str) -> dict[str, SiteSpec]:
    """Hook each module of experts in the decoder layers at `path`; return its parameters by name."""
    found: dict[str, SiteSpec] = {}
    for name, module in model.named_modules():
        if not name.startswith(f"{path}.") or not _known(module):
            continue
        layer = int(name.removeprefix(f"{path}.").split(".", 1)[0])
        own = {f"{name}.{leaf}": _spec(module, leaf, layer) for leaf in _leaves(module)}
        found |= own
        if not hasattr(module, SITES):
            setattr(module, SITES, tuple(own))
            module.forward = MethodType(_forward, module)
    return found


def _known(module: nn.Module) -> bool:
    described = all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "num_experts"))
    return (
        described
        and hasattr(type(module).forward, "__wrapped__")
        and all(
            isinstance(parameter := getattr(module, leaf, None), nn.Parameter) and parameter.ndim == 3
            for leaf in _leaves(module)
        )
    )


def _leaves(module: nn.Module) -> tuple[str, str]:
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def _spec(module: nn.Module, leaf: str, layer: int) -> SiteSpec:
    experts, outputs, inputs = cast(Tensor, getattr(module, leaf)).shape
    transposed = bool(module.is_transposed)
    if transposed:
        inputs, outputs = outputs, inputs
    halves: Halves = "concatenated" if getattr(module, "is_concatenated", True) else "interleaved"
    return SiteSpec(
        inputs,
        outputs,
        layer,
        experts=experts,
        chosen=_chosen(module, experts),
        transposed=transposed,
        halves=halves if leaf == "gate_up_proj" else "",
    )


def _chosen(module: nn.Module, experts: int) -> int:
    """Return the experts that compute a token; all of them if the config does not tell."""
    found = (getattr(module.config, name, None) for name in ("num_experts_per_tok", "top_k_experts", "moe_topk"))
    return next((count for count in found if isinstance(count, int)), experts)


def _forward(module: nn.Module, hidden_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The `forward` of every hooked module."""
    # Compiled layers run in fused forwards only, and tracing must not read the context (`model.lora`).
    if torch.compiler.is_dynamo_compiling() or current.context.fused is not None:
        return traced_forward(module, hidden_TD, chosen_TK, weights_TK)
    lora = current.context.lora
    experts = None if lora is None else lora.experts
    if experts is not None and experts.changes(cast("tuple[str, str]", getattr(module, SITES))):
        return experts_forward(module, experts, hidden_TD, chosen_TK, weights_TK)
    return cast(Tensor, type(module).forward(module, hidden_TD, chosen_TK, weights_TK))
