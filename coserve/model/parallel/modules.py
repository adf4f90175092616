"""A rank's shards in the modules of an unmodified model: smaller weights, and a collective where the plan has one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MethodType
from typing import cast

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from coserve.model.parallel.families import Heads
from coserve.model.parallel.functions import copy_to_ranks, sum_over_ranks
from coserve.model.parallel.mesh import Mesh
from coserve.model.parallel.partition import SitePartition

SHARD = "coserve_shard"
"""Attribute of a sharded module: its `SiteShard`."""
MESH = "coserve_mesh"
"""Attribute of a module whose input every rank needs whole."""


@dataclass(frozen=True, eq=False)
class SiteShard:
    """This rank's part of a linear module."""

    partition: SitePartition
    mesh: Mesh

    def sum(self, y: Tensor, addend: Tensor | None = None) -> Tensor:
        """The output, of this rank's term `y`, which may be overwritten, and `addend`, if there is one."""
        return sum_over_ranks(y, self.mesh, addend)


def shard_of(module: nn.Module) -> SiteShard | None:
    """The module's shard; None: it is not sharded."""
    return cast("SiteShard | None", getattr(module, SHARD, None))


def shard_module(module: nn.Module, shard: SiteShard) -> None:
    """Makes a linear module, whose weights are sharded already, give what the whole module would, or this rank's part
    of it."""
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
    """Sums the ranks' gradients of the module's input on their way back (`copy_to_ranks`)."""
    setattr(module, MESH, mesh)
    module.register_forward_pre_hook(_copied, with_kwargs=True)


def _copied(
    module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]] | None:
    mesh = cast(Mesh, getattr(module, MESH))
    if args:
        x = args[0]
        assert isinstance(x, Tensor), "expected hidden states as the first argument"
        return (copy_to_ranks(x, mesh), *args[1:]), kwargs
    x = kwargs["hidden_states"]
    assert isinstance(x, Tensor), "expected hidden states"
    return args, kwargs | {"hidden_states": copy_to_ranks(x, mesh)}


class LocalConfig:
    """A config with some settings replaced, which follows later changes of the others."""

    def __init__(self, config: object, settings: Mapping[str, object]) -> None:
        self._config = config
        vars(self).update(settings)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)  # asked for while a copy is made, before `_config` is there
        return getattr(self.__dict__["_config"], name)


def shard_attention(module: nn.Module, heads: Heads, known: dict[int, LocalConfig]) -> None:
    """Tells an attention module how many heads this rank has, under the names that families use. `known`: by the id of
    a config, that of the modules before, so that layers do not differ in theirs."""
    query, key_value = heads.local_query, heads.local_key_value
    counts = {
        "num_heads": query,
        "num_attention_heads": query,
        "num_key_value_heads": key_value,
        "num_key_value_groups": query // key_value,
        "split_size": query * heads.size,
    }
    for name, count in counts.items():
        if hasattr(module, name):
            setattr(module, name, count)
    config = getattr(module, "config", None)
    if config is not None:
        local = {"num_attention_heads": query, "num_key_value_heads": key_value}
        vars(module)["config"] = known.setdefault(id(config), LocalConfig(config, local))
