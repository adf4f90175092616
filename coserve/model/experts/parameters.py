"""The fused parameters of a module of experts.

transformers' experts, whatever their family, hold one 3-D parameter for gate and up, and one for down, and describe
their layout by attributes that its decorator sets (`use_experts_implementation`).
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from coserve.core.types import Halves, SiteSpec


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
    """Return the experts that compute a token; all of them if the config does not tell."""
    found = (getattr(module.config, name, None) for name in ("num_experts_per_tok", "top_k_experts", "moe_topk"))
    return next((count for count in found if isinstance(count, int)), experts)
