"""Finds the modules of experts in a transformers model, and hooks them to add LoRA terms and the other ranks' parts.

transformers' experts, whatever their family, hold one 3-D parameter for gate and up, and one for down, and describe
their layout by attributes that its decorator sets (`use_experts_implementation`).
"""

from __future__ import annotations

from types import MethodType
from typing import cast

import torch
from torch import Tensor, nn

from coserve.core.types import Halves, SiteSpec
from coserve.model.experts.forward import SITES, experts_forward, remote_forward, scored_forward, traced_forward
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


def has_experts(module: nn.Module) -> bool:
    """Whether it is a module of experts with fused parameters."""
    described = all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "num_experts"))
    return (
        described
        and hasattr(type(module).forward, "__wrapped__")
        and all(
            isinstance(parameter := getattr(module, leaf, None), nn.Parameter) and parameter.ndim == 3
            for leaf in leaves(module)
        )
    )


def describe_experts(module: nn.Module) -> None:
    """Give Llama 4's experts the attributes that transformers' decorator sets on those of other families."""
    if not hasattr(module, "has_gate"):
        vars(module).update(has_gate=True, has_bias=False, is_transposed=True, config=None)


def leaves(module: nn.Module) -> tuple[str, str]:
    """Return the names of the parameters, gate and up first."""
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def parameter_spec(module: nn.Module, leaf: str, layer: int) -> SiteSpec:
    """Return the sizes and the layout of a parameter."""
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
    """Return the number of experts per token; all of them if the config does not tell."""
    found = (getattr(module.config, name, None) for name in ("num_experts_per_tok", "top_k_experts", "moe_topk"))
    return next((count for count in found if isinstance(count, int)), experts)
