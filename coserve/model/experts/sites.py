"""Finds the modules of experts in a transformers model, and hooks them to add LoRA terms and the other ranks' parts."""

from __future__ import annotations

from types import MethodType
from typing import cast

import torch
from torch import Tensor, nn

from coserve.core.types import SiteSpec
from coserve.model.experts.forward import SITES, experts_forward, remote_forward, scored_forward, traced_forward
from coserve.model.experts.parameters import has_experts, leaves, parameter_spec
from coserve.model.experts.shards import expert_shard
from coserve.model.forward_context import current


def expert_sites(model: nn.Module, path: str) -> dict[str, SiteSpec]:
    """Hook each module of experts in the decoder layers at `path`; return its parameters by name."""
    found: dict[str, SiteSpec] = {}
    for name, module in model.named_modules():
        if not name.startswith(f"{path}.") or not has_experts(module):
            continue
        layer, shard = int(name.removeprefix(f"{path}.").split(".", 1)[0]), expert_shard(module)
        for leaf in leaves(module):
            spec = parameter_spec(module, leaf, layer)
            found[f"{name}.{leaf}"] = spec if shard is None else shard.partitions[leaf].whole(spec)
        hook_experts(name, module)
    return found


def hook_shards(model: nn.Module) -> None:
    """Hook each module of experts that is sharded, so that it returns the sum of all ranks' parts."""
    for name, module in model.named_modules():
        if expert_shard(module) is None:
            continue
        if has_experts(module):
            hook_experts(name, module)
        else:
            module.forward = MethodType(scored_forward, module)


def hook_experts(name: str, module: nn.Module) -> None:
    """Hook one module of experts, once. `name`: its path in the model."""
    if not hasattr(module, SITES):
        setattr(module, SITES, tuple(f"{name}.{leaf}" for leaf in leaves(module)))
        module.forward = MethodType(_forward, module)


def _forward(module: nn.Module, hidden_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The `forward` of every hooked module."""
    # Compiled layers run in fused forwards only, and tracing must not read the context (`model.lora`).
    if torch.compiler.is_dynamo_compiling() or current.context.fused is not None:
        return traced_forward(module, hidden_TD, chosen_TK, weights_TK)
    lora = current.context.lora
    experts = None if lora is None else lora.experts
    if experts is not None and not experts.changes(cast("tuple[str, str]", getattr(module, SITES))):
        experts = None
    if lora is not None and lora.remote is not None:
        return remote_forward(module, experts, lora.remote, hidden_TD, chosen_TK, weights_TK)
    if experts is not None or expert_shard(module) is not None:
        return experts_forward(module, experts, hidden_TD, chosen_TK, weights_TK)
    return cast(Tensor, type(module).forward(module, hidden_TD, chosen_TK, weights_TK))
