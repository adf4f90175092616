"""Shards the modules of an unmodified model: smaller weights, and collectives where the plan has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MethodType
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers.pytorch_utils import Conv1D

from coserve.model.parallel.families.partitions import Heads
from coserve.model.parallel.functions import copy_to_ranks, divide_gradient, sum_over_ranks, sum_shared
from coserve.model.parallel.mesh import Mesh
from coserve.model.parallel.partition import SitePartition

MEAN = "coserve_mean"
"""Attribute that holds the mesh, for norms over partitioned features."""

SHARD = "coserve_shard"
"""Attribute of a sharded module that holds its `SiteShard`."""
MESH = "coserve_mesh"
"""Attribute that holds the mesh, for modules whose input every rank needs in full."""


@dataclass(frozen=True, eq=False)
class SiteShard:
    """This rank's shard of a linear module."""

    partition: SitePartition
    mesh: Mesh

    def sum(self, y: Tensor, addend: Tensor | None = None) -> Tensor:
        """Return the module's output: the sum of the ranks' `y`, which may be overwritten, plus `addend`, if given."""
        return sum_over_ranks(y, self.mesh, addend)


def shard_of(module: nn.Module) -> SiteShard | None:
    """Return the module's shard; None if it is not sharded."""
    return cast("SiteShard | None", getattr(module, SHARD, None))


def shard_module(module: nn.Module, shard: SiteShard) -> None:
    """Make a linear module with sharded weights return the whole module's output, or this rank's columns of it."""
    inputs, outputs = shard.partition.inputs.local, shard.partition.outputs.local
    if isinstance(module, Conv1D):
        module.nx, module.nf = inputs, outputs
    else:
        assert isinstance(module, nn.Linear), f"expected a linear module, got {type(module).__name__}"
        module.in_features, module.out_features = inputs, outputs
    setattr(module, SHARD, shard)
    if shard.partition.sums:
        vars(module)["forward"] = MethodType(_summed, module)


def _summed(module: nn.Module, x: Tensor) -> Tensor:
    shard = shard_of(module)
    assert shard is not None, "expected a sharded module"
    return shard.sum(type(module).forward(module, x))


def copy_input(module: nn.Module, mesh: Mesh) -> None:
    """Sum the gradients of the module's input over the ranks in the backward (`copy_to_ranks`)."""
    setattr(module, MESH, mesh)
    module.register_forward_pre_hook(_copied, with_kwargs=True)


def _copied(
    module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]] | None:
    mesh = cast(Mesh, getattr(module, MESH))
    if args:
        x = args[0]
        assert isinstance(x, Tensor), "expected hidden states as the first argument"
        copied = copy_to_ranks(x, mesh)
        return tuple(copied if one is x else one for one in args), kwargs  # CTRL passes them as query, key and value
    x = kwargs["hidden_states"]
    assert isinstance(x, Tensor), "expected hidden states"
    return args, kwargs | {"hidden_states": copy_to_ranks(x, mesh)}


def copy_output(module: nn.Module, mesh: Mesh) -> None:
    """Sum the gradients of the module's output over the ranks in the backward, where each rank has a part of it."""

    def copied(module: nn.Module, args: tuple[object, ...], output: Tensor) -> Tensor:
        return copy_to_ranks(output, mesh)

    module.register_forward_hook(copied)


def sum_output(module: nn.Module, mesh: Mesh) -> None:
    """Sum the module's output, or the first of several, over the ranks."""

    def summed(module: nn.Module, args: tuple[object, ...], output: Tensor | tuple[Tensor, ...]) -> object:
        if isinstance(output, tuple):
            return sum_over_ranks(output[0], mesh), *output[1:]
        return sum_over_ranks(output, mesh)

    module.register_forward_hook(summed)


def share_gradient(module: nn.Module, mesh: Mesh) -> None:
    """Divide the gradient of a replicated module's output by the number of ranks, because the modules before it sum
    the ranks' gradients."""

    def divided(module: nn.Module, args: tuple[object, ...], output: Tensor) -> Tensor:
        return divide_gradient(output, mesh)

    module.register_forward_hook(divided)


class LocalConfig:
    """A config with some settings replaced; later changes of the others show through."""

    def __init__(self, config: object, settings: Mapping[str, object]) -> None:
        self._config = config
        vars(self).update(settings)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)  # accessed while a copy is made, before `_config` exists
        return getattr(self.__dict__["_config"], name)


def shard_mixer(module: nn.Module, ranks: int) -> None:
    """Tell a recurrent mixer this rank's numbers of heads, groups and features, under the names that families use."""
    one_group = getattr(module, "n_groups", 1) == 1
    for name in ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "num_heads", "intermediate_size", "n_groups"):
        if hasattr(module, name):
            setattr(module, name, max(1, getattr(module, name) // ranks))  # one group is on every rank
    for child in module.children():
        if isinstance(groups := getattr(child, "n_groups", None), int):  # a norm's
            vars(child)["n_groups"] = max(1, groups // ranks)
        if one_group and isinstance(size := getattr(child, "group_size", None), int):
            vars(child)["group_size"] = size // ranks
        if isinstance(child, nn.Conv1d):
            channels = child.weight.shape[0]
            child.in_channels = child.out_channels = child.groups = channels
            if hasattr(module, "conv_dim"):
                vars(module)["conv_dim"] = channels


def shard_attention(module: nn.Module, heads: Heads, known: dict[tuple[int, int], LocalConfig]) -> None:
    """Tell an attention module this rank's number of heads, under the names that families use.

    `known`: configs made for earlier modules, by the id of the original and the number of key/value heads, so that
    layers share one.
    """
    query, key_value, size = heads.local_query, heads.local_key_value, getattr(module, "head_dim", 0)
    counts = {
        "num_heads": query,
        "num_attention_heads": query,
        "num_key_value_heads": key_value,
        "num_key_value_groups": query // key_value,
        "split_size": query * size,
        "embed_dim": query * size,
        "kv_dim": key_value * size,
    }
    for name, count in counts.items():
        if hasattr(module, name):
            setattr(module, name, count)
    if hasattr(module, "kv_projection_size"):
        vars(module.experts)["hidden_size"] = query * size // cast(int, module.top_k)  # JetMoE's experts of queries
    config = getattr(module, "config", None)
    if config is not None:
        local = {"num_attention_heads": query, "num_key_value_heads": key_value}
        vars(module)["config"] = known.setdefault((id(config), key_value), LocalConfig(config, local))


def norm_groups(norm: nn.Module, mixer: nn.Module) -> object:
    """Return into how many groups a norm divides the features of a whole mixer, to normalise each by itself."""
    return getattr(norm, "n_groups", getattr(mixer, "n_groups", 1) if hasattr(norm, "group_size") else 1)


def share_mean(module: nn.Module, mesh: Mesh) -> None:
    """Let an RMS norm of this rank's features (..., D/N) normalise by the mean of squares over all ranks' features.

    The family's own module normalises this rank's features; its output is then scaled from this rank's mean to that of
    all ranks, which costs a sum of 4 bytes a token. So a norm may add to its weight, gate its input or its output as it
    likes.
    """
    setattr(module, MEAN, mesh)
    module.register_forward_hook(_scaled, with_kwargs=True)


def _scaled(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor | None], y: Tensor) -> Tensor:
    mesh, x = cast(Mesh, getattr(module, MEAN)), args[0].float()
    gate = args[1] if len(args) > 1 else kwargs.get("gate")
    if gate is not None and not getattr(module, "norm_before_gate", False):
        x = x * silu(gate.float())
    own = x.pow(2).mean(-1, keepdim=True)
    total = torch.ops.coserve.rank_sum(own) if torch.compiler.is_dynamo_compiling() else sum_shared(own.clone(), mesh)
    epsilon = cast(float, getattr(module, "variance_epsilon", None) or getattr(module, "eps", 0.0))
    scale = ((own + epsilon) / (total / mesh.size + epsilon)).sqrt()
    return (y.float() * scale).to(y.dtype)
