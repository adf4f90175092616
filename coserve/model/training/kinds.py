"""Kinds of layers: layers are of one kind if their code may read the same values, except for their own tensors."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from coserve.model.experts.forward import SITES as EXPERT_SITES
from coserve.model.lora import SITE, SharedInput
from coserve.model.packed import PACKED

NOT_COMPARED = frozenset({"layer_idx", "forward", SITE, EXPERT_SITES, PACKED, "_parameters", "_buffers", "_modules"})
"""Attributes of a module that do not affect its kind, or that are compared separately."""
HOOKS = "_hooks"
"""Substring of the names of a module's hook tables, whose keys are unique numbers."""
PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)


def kind_of(layer: nn.Module, groups: Mapping[str, SharedInput]) -> Hashable:
    """Return a key that is equal for layers with the same traced code. `groups`: by path of the site's module in the
    layer."""
    found: list[Hashable] = []
    for name, module in layer.named_modules():
        if name in groups:
            found.append((name, groups[name].index, groups[name].sizes))
        else:
            found.append((name, type(module), _plain_attributes(module), _shapes(own_tensors_of(module))))
    return tuple(found)


def own_tensors(layer: nn.Module, groups: Mapping[str, SharedInput]) -> dict[str, Tensor]:
    """Return a layer's parameters and buffers that are not its sites', by path."""
    return {
        f"{name}.{own}" if name else own: tensor
        for name, module in layer.named_modules()
        if name not in groups
        for own, tensor in own_tensors_of(module).items()
    }


def own_tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of one module, without those of its submodules."""
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
    """Return a text that is equal for equal plain values. Other objects, such as the config that all layers share, are
    equal only to themselves."""
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
