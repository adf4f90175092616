"""Which layers are of one kind: whatever their code may read, but for their own tensors, is the same."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from coserve.model.lora import SITE, SharedInput

NOT_COMPARED = frozenset({"layer_idx", "forward", SITE, "_parameters", "_buffers", "_modules"})
"""Attributes of a module that a kind does not depend on, or that are looked at by themselves."""
HOOKS = "_hooks"
"""In the names of a module's tables of hooks, whose keys are numbers that no two hooks share."""
PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)


def kind_of(layer: nn.Module, groups: Mapping[str, SharedInput]) -> Hashable:
    """Equal for layers whose traced code is the same. `groups`: of its sites' modules, by their path in the layer."""
    found: list[Hashable] = []
    for name, module in layer.named_modules():
        if name in groups:
            found.append((name, groups[name].index, groups[name].sizes))
        else:
            found.append((name, type(module), _plain_attributes(module), _shapes(own_tensors_of(module))))
    return tuple(found)


def own_tensors(layer: nn.Module, groups: Mapping[str, SharedInput]) -> dict[str, Tensor]:
    """The parameters and buffers of a layer that are not its sites', by path."""
    return {
        f"{name}.{own}" if name else own: tensor
        for name, module in layer.named_modules()
        if name not in groups
        for own, tensor in own_tensors_of(module).items()
    }


def own_tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of one module, without those of modules in it."""
    return dict((*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)))


def _plain_attributes(module: nn.Module) -> Hashable:
    return tuple(
        sorted(
            (name, plain([*value.values()] if isinstance(value, dict) and HOOKS in name else value))
            for name, value in vars(module).items()
            if name not in NOT_COMPARED
        )
    )


def plain(value: object) -> str:
    """Equal for equal plain values; of others, such as the config that all layers share, for the same object alone."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, list | tuple):
        return repr([plain(one) for one in cast("list[object]", value)])
    if isinstance(value, set | frozenset):
        return repr(sorted(plain(one) for one in cast("set[object]", value)))
    if isinstance(value, dict) and not value:
        return "{}"
    return f"{type(value).__name__} at {id(value)}"


def _shapes(tensors: Mapping[str, Tensor]) -> Hashable:
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())
