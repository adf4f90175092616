"""Builds one tensor-parallel rank's model: the family's own classes, made without memory, then filled with the rank's
slices of the weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coserve.core.errors import UnsupportedBase
from coserve.model.experts.shards import EXPERTS, FIRST, ExpertPartition, ExpertShard, expert_shard
from coserve.model.experts.sites import describe_experts, leaves, parameter_spec
from coserve.model.parallel.families.partitions import (
    block_sites,
    block_stacks,
    block_vectors,
    features,
    heads_of,
    plan_of,
    planned_blocks,
)
from coserve.model.parallel.families.plans import Block, joined
from coserve.model.parallel.lora import Strategy
from coserve.model.parallel.mesh import Mesh
from coserve.model.parallel.modules import (
    MEAN,
    LocalConfig,
    SiteShard,
    copy_input,
    copy_output,
    norm_groups,
    shard_attention,
    shard_mixer,
    shard_module,
    share_gradient,
    share_mean,
    sum_output,
)
from coserve.model.parallel.partition import Features, Lazy, MatrixPartition, SitePartition
from coserve.model.parallel.quantized_shards import check_shard, take_shard
from coserve.model.parallel.sharding import Sharding
from coserve.model.parallel.vocabulary import VocabularyShard
from coserve.model.quantized.modules import QuantizedLinear
from coserve.model.wrappers import drop_other_parts, model_class


class Weights(Protocol):
    """Access to the whole base's parameters."""

    def get(self, name: str, shape: torch.Size) -> Lazy:
        """Return the parameter of that name. Reading a slice of it costs no more than that slice."""

    def has(self, name: str) -> bool:
        """Whether a buffer of that name is stored."""


def empty_model(config: PretrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool) -> PreTrainedModel:
    """Return the model of a config, with parameters and buffers on torch's `meta` device. What transformers keeps in
    fp32 (biases of routers, decays of recurrent layers) is so here, too."""
    with torch.device("meta"):
        model: PreTrainedModel = model_class(config).from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code
        )
    drop_other_parts(model)
    if kept := model._get_dtype_plan(dtype):
        pattern = re.compile("|".join(name.replace("*", ".*") for name in kept))
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if pattern.search(name):
                tensor.data = tensor.data.float()
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
    Modules that are `QuantizedLinear`s take quantised shards.

    Every rank has the whole embedding. The head has the rank's shard of the vocabulary, a view of the embedding if the
    two are tied, so the model's logits are those of the shard. `by_expert`: a rank has some experts of a mixture whole,
    not features of all. Modules of experts get their `ExpertShard`, but no forward that sums up. On torch's `meta`
    device shards have sizes alone.

    Raises:
        UnsupportedBase: a family without a plan, sizes that the ranks do not divide (for quantised modules see
            `check_shard`), missing weights.
    """
    plan = plan_of(model.config, mesh.size)
    vocabulary = VocabularyShard(mesh, model.config.get_text_config().vocab_size)
    blocks = {
        f"{path}.{block.path}": block
        for path in _layers(model)
        for block in planned_blocks(plan, model.get_submodule(path), path)
    }
    sites, others = _partitions(model, blocks, mesh)
    for path, site in sites.items():
        if isinstance(module := model.get_submodule(path), QuantizedLinear):
            check_shard(path, module, site)
    biases = {f"{path}.{block.output_bias}" for path, block in blocks.items() if block.output_bias is not None}
    experts = _shard_experts(model, blocks, mesh, by_expert=by_expert)
    head = model.get_output_embeddings()
    if device.type != "meta":
        _fill_buffers(model, weights, device)
    _fill_ends(model, weights, vocabulary, device)
    for path, module in model.named_modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                name, partition, shard = f"{path}.{leaf}", sites.get(path), expert_shard(module)
                whole = weights.get(name, parameter.shape)
                if leaf == "weight" and isinstance(module, QuantizedLinear):
                    take_shard(module, whole, sites[path], mesh.rank, device)
                    continue
                if shard is not None:
                    part = _expert_part(module, leaf, whole, shard)
                elif name in others:
                    dimension, own = others[name]
                    part = own.shard(whole, mesh.rank, dimension)
                elif name in biases and mesh.rank:
                    part = torch.zeros(parameter.shape)
                else:
                    part = whole[:] if partition is None else _part(module, leaf, whole, partition, mesh.rank)
                _place(module, leaf, part, parameter.dtype, device)
    for path, partition in sites.items():
        shard_module(model.get_submodule(path), SiteShard(partition, mesh))
    _shard_blocks(model, blocks, mesh)
    copy_input(head, mesh)
    norms = any(hasattr(module, MEAN) for module in model.modules())
    return Sharding(mesh, sites, vocabulary, strategy, experts, norms=norms)


def _layers(model: PreTrainedModel) -> list[str]:
    """Return the paths of the decoder layers."""
    count = model.config.get_text_config().num_hidden_layers
    lists = (path for path, one in model.named_modules() if isinstance(one, nn.ModuleList) and len(one) == count)
    return [f"{path}.{index}" for path in lists for index in range(count)]


def _partitions(
    model: PreTrainedModel, blocks: Mapping[str, Block], mesh: Mesh
) -> tuple[dict[str, SitePartition], dict[str, tuple[int, Features]]]:
    """Return the partitions of the blocks' linear modules, and those of other parameters with their dimension, by their
    paths."""
    sites, others = dict[str, SitePartition](), dict[str, tuple[int, Features]]()
    for path, block in blocks.items():
        module = model.get_submodule(path)
        heads = heads_of(model.config, module, mesh.size, path)
        found = block_sites(block, module, heads, path)
        sites |= {joined(path, name): partition for name, partition in found.items()}
        for name, own in block_vectors(block, module, heads, path).items():
            others[f"{path}.{name}"] = 0, own
        for name, stack in block_stacks(block, module, heads, path).items():
            others[f"{path}.{name}"] = stack
    return sites, others


def _shard_blocks(model: PreTrainedModel, blocks: Mapping[str, Block], mesh: Mesh) -> None:
    """Tell the blocks their shards' sizes, and hook what the ranks have to exchange."""
    configs = dict[tuple[int, int], LocalConfig]()
    for path, block in blocks.items():
        module = model.get_submodule(path)
        heads = heads_of(model.config, module, mesh.size, path)
        if block.attention:
            shard_attention(module, heads, configs)
        for name, width in block.scales.items():
            scale = module.get_buffer(name)
            own = features(width, scale.shape[-1], heads, f"{path}.{name}", module)
            setattr(module, name, own.shard(scale, mesh.rank, scale.ndim - 1).contiguous())
        for name in block.norms:
            norm = module.get_submodule(name)
            if norm_groups(norm, module) == 1:  # several groups are divided among the ranks
                share_mean(norm, mesh)
        if block.recurrent:
            shard_mixer(module, mesh.size)
        for name in block.gates:
            share_gradient(module.get_submodule(name), mesh)
        for name in block.inner_sums:
            copy_output(module.get_submodule(name), mesh)
        if block.output_bias is not None:
            sum_output(module, mesh)
        if "" not in block.row:
            copy_input(module, mesh)


def _shard_experts(
    model: PreTrainedModel, blocks: Mapping[str, Block], mesh: Mesh, *, by_expert: bool
) -> dict[str, ExpertPartition]:
    """Give each module of experts its `ExpertShard`. Return the parameters' partitions by name."""
    paths = [joined(path, block.experts) for path, block in blocks.items() if block.experts is not None]
    if by_expert and not paths:
        raise UnsupportedBase(f"{model.config.model_type} has no experts to divide among GPUs: expected ep of 1")
    found: dict[str, ExpertPartition] = {}
    for path in paths:
        module = model.get_submodule(path)
        describe_experts(module)
        own = {
            leaf: ExpertPartition.of(parameter_spec(module, leaf, 0), leaf, mesh.size, by_expert=by_expert)
            for leaf in leaves(module)
        }
        setattr(module, EXPERTS, ExpertShard(own, mesh))
        if by_expert:
            module.num_experts = next(iter(own.values())).experts.local
            setattr(module, FIRST, mesh.rank * module.num_experts)
        found |= {f"{path}.{leaf}": partition for leaf, partition in own.items()}
    return found


def _expert_part(module: nn.Module, leaf: str, whole: Lazy, shard: ExpertShard) -> Tensor:
    """Return the rank's shard of a parameter or bias of experts."""
    rank, bias = shard.mesh.rank, leaf.endswith("_bias")
    partition = shard.partitions[leaf.removesuffix("_bias")]
    if bias:
        return partition.bias(whole, rank)
    return partition.weight(whole, rank, transposed=bool(module.is_transposed))


def _fill_buffers(model: PreTrainedModel, weights: Weights, device: torch.device) -> None:
    """Read the buffers that are stored (biases of routers), and compute the others (rotary frequencies, scales of
    embeddings) with the family's own code.

    Raises `UnsupportedBase` for a buffer that is neither.
    """
    kinds = {name: buffer.dtype for name, buffer in model.named_buffers(remove_duplicate=False)}
    for path, module in model.named_modules():
        own = list(module.named_buffers(recurse=False))
        stored = {name for name, _ in own if weights.has(f"{path}.{name}")}
        for name, buffer in own:
            kind = buffer.dtype if buffer.is_floating_point() else torch.float64  # NaN: unfilled; integers lack it
            empty = torch.full_like(buffer, torch.nan, device=device, dtype=kind)
            module.register_buffer(name, empty, persistent=name in stored)
        if len(stored) < len(own):
            model._init_weights(module)
        for name in stored:
            buffer = module.get_buffer(name)
            buffer.copy_(weights.get(f"{path}.{name}", buffer.shape)[()])
    if _unfilled(model):
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                model._init_weights(module)  # Falcon-H1's fills buffers of its layers
    if name := _unfilled(model):
        raise UnsupportedBase(f"{model.config.model_type}: {name} is a buffer that ranks cannot compute")
    for name, buffer in model.named_buffers():
        buffer.data = buffer.data.to(kinds[name])


def _unfilled(model: PreTrainedModel) -> str:
    """Return the path of a buffer that nothing has filled; "" if there is none."""
    return next((name for name, buffer in model.named_buffers() if buffer.isnan().any()), "")


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
