"""Builds one tensor-parallel rank's model: the family's own classes, made without memory, then filled with the rank's
slices of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coserve.core.errors import UnsupportedBase
from coserve.model.experts.parameters import leaves, parameter_spec
from coserve.model.experts.shards import EXPERTS, FIRST, ExpertPartition, ExpertShard, expert_shard
from coserve.model.parallel.families import Plan, heads_of, layer_partitions, plan_of
from coserve.model.parallel.lora import Strategy
from coserve.model.parallel.mesh import Mesh
from coserve.model.parallel.modules import LocalConfig, SiteShard, copy_input, shard_attention, shard_module
from coserve.model.parallel.partition import Features, Lazy, MatrixPartition, SitePartition
from coserve.model.parallel.sharding import Sharding
from coserve.model.parallel.vocabulary import VocabularyShard
from coserve.model.wrappers import drop_other_parts, model_class


class Weights(Protocol):
    """Access to the whole base's parameters."""

    def get(self, name: str, shape: torch.Size) -> Lazy:
        """Return the parameter of that name. Reading a slice of it costs no more than that slice."""


def empty_model(config: PretrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool) -> PreTrainedModel:
    """Return the model of a config, with parameters and buffers on torch's `meta` device."""
    with torch.device("meta"):
        model: PreTrainedModel = model_class(config).from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code
        )
    drop_other_parts(model)
    return model


@torch.no_grad()
def fill_shard(
    model: PreTrainedModel,
    weights: Weights,
    mesh: Mesh,
    device: torch.device,
    strategy: Strategy,
    *,
    by_expert: bool = False,
) -> Sharding:
    """Turn an `empty_model` into this rank's shard of the base on `device`, with collectives where the plan has them.

    Every rank has the whole embedding. The head has the rank's shard of the vocabulary, a view of the embedding if the
    two are tied, so the model's logits are those of the shard. `by_expert`: a rank has some experts of a mixture whole,
    not features of all. Modules of experts get their `ExpertShard`, but no forward that sums up.

    Raises:
        UnsupportedBase: a family without a plan, sizes that the ranks do not divide, missing weights.
    """
    plan = plan_of(model.config, mesh.size)
    vocabulary = VocabularyShard(mesh, model.config.get_text_config().vocab_size)
    layers = _layers(model)
    sites = _shard_layers(model, plan, mesh)
    vectors = {f"{path}.{name}" for path in layers for name in plan.heads}
    experts = _shard_experts(model, plan, mesh, layers, by_expert=by_expert)
    head = model.get_output_embeddings()
    _fill_buffers(model, device)
    _fill_ends(model, weights, vocabulary, device)
    for path, module in model.named_modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                whole = weights.get(f"{path}.{leaf}", parameter.shape)
                partition, shard = sites.get(path), expert_shard(module)
                if shard is not None:
                    part = _expert_part(module, leaf, whole, shard)
                elif f"{path}.{leaf}" in vectors:
                    part = Features.even(parameter.shape[0], mesh.size).shard(whole, mesh.rank)
                else:
                    part = whole[:] if partition is None else _part(module, leaf, whole, partition, mesh.rank)
                _place(module, leaf, part, parameter.dtype, device)
    for path, partition in sites.items():
        shard_module(model.get_submodule(path), SiteShard(partition, mesh))
    copy_input(head, mesh)
    return Sharding(mesh, sites, vocabulary, strategy, experts)


def _layers(model: PreTrainedModel) -> list[str]:
    """Return the paths of the decoder layers."""
    count = model.config.get_text_config().num_hidden_layers
    lists = (path for path, one in model.named_modules() if isinstance(one, nn.ModuleList) and len(one) == count)
    return [f"{path}.{index}" for path in lists for index in range(count)]


def _shard_experts(
    model: PreTrainedModel, plan: Plan, mesh: Mesh, layers: Sequence[str], *, by_expert: bool
) -> dict[str, ExpertPartition]:
    """Give each module of experts its `ExpertShard`. Return the parameters' partitions by name."""
    if by_expert and not plan.experts:
        raise UnsupportedBase(f"{model.config.model_type} has no experts to divide among GPUs: expected ep of 1")
    found: dict[str, ExpertPartition] = {}
    for path in layers if plan.experts else ():
        try:
            module = model.get_submodule(f"{path}.{plan.experts}")
        except AttributeError as error:
            raise UnsupportedBase(
                f"{model.config.model_type}: {path} has no experts, and several GPUs need them in every layer"
            ) from error
        own = {
            leaf: ExpertPartition.of(parameter_spec(module, leaf, 0), leaf, mesh.size, by_expert=by_expert)
            for leaf in leaves(module)
        }
        setattr(module, EXPERTS, ExpertShard(own, mesh))
        if by_expert:
            module.num_experts = next(iter(own.values())).experts.local
            setattr(module, FIRST, mesh.rank * module.num_experts)
        found |= {f"{path}.{plan.experts}.{leaf}": partition for leaf, partition in own.items()}
    return found


def _expert_part(module: nn.Module, leaf: str, whole: Lazy, shard: ExpertShard) -> Tensor:
    """Return the rank's shard of a parameter or bias of experts."""
    rank, bias = shard.mesh.rank, leaf.endswith("_bias")
    partition = shard.partitions[leaf.removesuffix("_bias")]
    if bias:
        return partition.bias(whole, rank)
    return partition.weight(whole, rank, transposed=bool(module.is_transposed))


def _shard_layers(model: PreTrainedModel, plan: Plan, mesh: Mesh) -> dict[str, SitePartition]:
    """Shard each layer's attention and hook its two blocks (`copy_input`). Return the modules' partitions, by their
    paths in the model."""
    partitions, heads = layer_partitions(model.config, plan, mesh.size), heads_of(model.config, mesh.size)
    found: dict[str, SitePartition] = {}
    configs: dict[int, LocalConfig] = {}
    for path, module in list(model.named_modules()):
        if not isinstance(module, nn.ModuleList) or len(module) != model.config.get_text_config().num_hidden_layers:
            continue
        for index, layer in enumerate(module):
            for name, partition in partitions.items():
                layer.get_submodule(name)  # raises if the plan does not fit this model
                found[f"{path}.{index}.{name}"] = partition
            shard_attention(layer.get_submodule(plan.blocks[0]), heads, configs)
            for block in plan.blocks:
                copy_input(layer.get_submodule(block), mesh)
    return found


def _fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute buffers that are not in files (rotary frequencies, scales of embeddings) with the family's own code.

    Raises `UnsupportedBase` for a buffer that it does not compute.
    """
    for path, module in model.named_modules():
        own = list(module.named_buffers(recurse=False))
        for name, buffer in own:
            if not buffer.is_floating_point():
                raise UnsupportedBase(f"{model.config.model_type}: {path}.{name} is a buffer that ranks cannot compute")
            module.register_buffer(name, torch.full_like(buffer, torch.nan, device=device), persistent=False)
        if own:
            model._init_weights(module)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.isnan().any():
                raise UnsupportedBase(f"{model.config.model_type}: {path}.{name} is a buffer that ranks cannot compute")


def _fill_ends(model: PreTrainedModel, weights: Weights, vocabulary: VocabularyShard, device: torch.device) -> None:
    """Fill the embedding and the head."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: path for path, module in model.named_modules()}
    local, start, stop = vocabulary.local, vocabulary.start, vocabulary.stop
    if embedding.weight is head.weight:
        whole = weights.get(f"{names[embedding]}.weight", embedding.weight.shape)
        rows = _rows(whole[:], local * vocabulary.mesh.size, embedding.weight.dtype, device)
        embedding.weight = nn.Parameter(rows[: vocabulary.size], requires_grad=False)
        head.weight = nn.Parameter(rows[vocabulary.mesh.rank * local :][:local], requires_grad=False)
    for leaf, parameter in list(head.named_parameters(recurse=False)):
        if parameter.is_meta:
            whole = weights.get(f"{names[head]}.{leaf}", parameter.shape)
            rows = _rows(whole[start:stop], local, parameter.dtype, device)
            setattr(head, leaf, nn.Parameter(rows, requires_grad=False))
    head.out_features = local


def _rows(tensor: Tensor, rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy the tensor and append rows of zeros, up to `rows`."""
    own = torch.zeros(rows, *tensor.shape[1:], dtype=dtype, device=device)
    own[: len(tensor)] = tensor
    return own


def _part(module: nn.Module, leaf: str, whole: Lazy, partition: SitePartition, rank: int) -> Tensor:
    """Return the rank's shard of a site's weight or bias. The bias of summed outputs goes to rank 0 only, so that it is
    added once."""
    if leaf == "bias":
        bias = partition.outputs.shard(whole, rank)
        return bias if not partition.sums or rank == 0 else torch.zeros_like(bias)
    if leaf != "weight":
        raise UnsupportedBase(f"expected a weight and a bias, got {leaf}")
    turned = isinstance(module, Conv1D)
    matrix = (
        MatrixPartition(partition.inputs, partition.outputs)
        if turned
        else MatrixPartition(partition.outputs, partition.inputs)
    )
    return matrix.shard(whole, rank)


def _place(module: nn.Module, leaf: str, part: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """Put a copy of `part` into the module, as `part` may be a file's own memory."""
    own = torch.empty(part.shape, dtype=dtype, device=device).copy_(part)
    setattr(module, leaf, nn.Parameter(own, requires_grad=False))
