"""How the layers of a family are sharded: the partition of each module that its plan names, and what cannot be
divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from coserve.core.errors import UnsupportedBase
from coserve.model.parallel.families.plans import PLANS, Block, Plan, Width, blocks_of, joined, weights_of
from coserve.model.parallel.partition import Features, Parallel, SitePartition


@dataclass(frozen=True)
class Heads:
    """Numbers of attention heads, in a whole layer and on one rank. Without grouped-query attention, there are as many
    key/value heads as query heads."""

    query: int
    key_value: int
    ranks: int

    @property
    def local_query(self) -> int:
        return self.query // self.ranks

    @property
    def local_key_value(self) -> int:
        return max(1, self.key_value // self.ranks)


def plan_of(config: PretrainedConfig, ranks: int) -> Plan:
    """Return the plan of a family that `ranks` GPUs can hold. Raises `UnsupportedBase` for others, with the reason."""
    family, text = config.model_type, config.get_text_config()
    plan = PLANS.get(family)
    if plan is None:
        raise UnsupportedBase(
            f"{family} has no plan for tensor parallelism; run it on one GPU, or one of {', '.join(PLANS)}"
        )
    for name, size in {"query heads": text.num_attention_heads, "hidden features": text.hidden_size}.items():
        if size % ranks:
            raise UnsupportedBase(f"{family}: expected a number of {name} that {ranks} GPUs divide, got {size}")
    return plan


def heads_of(config: PretrainedConfig, module: nn.Module, ranks: int, path: str) -> Heads:
    """Return the numbers of heads of the block at `path`: layers of one model may have different key/value heads.
    Raises `UnsupportedBase` for a number of them that the ranks cannot share."""
    query: int = config.get_text_config().num_attention_heads
    key_value = query // getattr(module, "num_key_value_groups", 1)
    if hasattr(module, "kv_projection_size") and (own := config.get_text_config().num_key_value_heads) % ranks:
        # JetMoE's experts of queries have a query for each of these heads: two ranks cannot share one.
        raise UnsupportedBase(f"{path}: expected a number of key/value heads that {ranks} GPUs divide, got {own}")
    if key_value % ranks and ranks % key_value:
        raise UnsupportedBase(
            f"{path}: expected a number of key/value heads that {ranks} GPUs divide, or that divides them, got "
            f"{key_value}"
        )
    return Heads(query, key_value, ranks)


def planned_blocks(plan: Plan, layer: nn.Module, path: str) -> list[Block]:
    """Return the blocks of the layer at `path`. Raises `UnsupportedBase` for a linear module that is in none of
    them."""
    blocks = blocks_of(plan, layer)
    for name, module in layer.named_modules():
        own = f"{name}.".startswith(tuple(f"{one.path}." for one in blocks))
        if isinstance(module, nn.Linear | Conv1D) and not own:
            raise UnsupportedBase(f"{path}.{name} has no plan for tensor parallelism; run this base on one GPU")
    return blocks


def block_sites(block: Block, module: nn.Module, heads: Heads, path: str) -> dict[str, SitePartition]:
    """Return the partition of each linear module of a block, by its path in it. Those that the plan does not name are
    whole on every rank. Raises `UnsupportedBase` for sizes that the ranks do not divide."""
    found = {}
    for name, own in module.named_modules():
        if not isinstance(own, nn.Linear | Conv1D):
            continue
        outputs, inputs = own.weight.shape if isinstance(own, nn.Linear) else reversed(own.weight.shape)
        whole_in, whole_out = Features.whole(inputs, heads.ranks), Features.whole(outputs, heads.ranks)
        where = joined(path, name)
        if name in block.row:
            own_in = features(block.row[name], inputs, heads, where, module)
            found[name] = SitePartition(Parallel.ROW, own_in, whole_out)
        else:
            width = block.column.get(name)
            own_out = whole_out if width is None else features(width, outputs, heads, where, module)
            found[name] = SitePartition(Parallel.COLUMN, whole_in, own_out)
    return found


def block_vectors(block: Block, module: nn.Module, heads: Heads, path: str) -> dict[str, Features]:
    """Return the partition of each other parameter of a block, by its path in it. Raises `UnsupportedBase` as
    `block_sites`."""
    widths = {**block.vectors, **weights_of(block.norms)}
    widths |= {f"{name.removesuffix('weight')}bias": width for name, width in widths.items() if name.endswith("weight")}
    sizes = {name: parameter.shape[0] for name, parameter in module.named_parameters() if name in widths}
    return {name: features(widths[name], size, heads, f"{path}.{name}", module) for name, size in sizes.items()}


def block_stacks(block: Block, module: nn.Module, heads: Heads, path: str) -> dict[str, tuple[int, Features]]:
    """Return the dimension along which each of a block's stacks is partitioned, and its partition, by its path in it.
    Raises `UnsupportedBase` as `block_sites`."""
    return {
        name: (at, features(width, module.get_parameter(name).shape[at], heads, f"{path}.{name}", module))
        for name, (at, width) in block.stacks.items()
    }


def features(width: Width, size: int, heads: Heads, where: str, block: nn.Module) -> Features:
    """Divide `size` features of the module at `where` in a block. Raises `UnsupportedBase` if the ranks do not divide
    them."""
    query, key_value = heads.query, heads.key_value
    match width:
        case Width.EVEN:
            return _even([size], heads.ranks, where)
        case Width.KEY_VALUE:
            return Features.heads(key_value, size // key_value, heads.ranks)
        case Width.QKV:
            if not getattr(block, "multi_query", True):
                return _even([size], heads.ranks, where)
            head = size // (query + 2 * key_value)
            by_head = Features.heads(key_value, head, heads.ranks)
            return Features.joined([Features.even(query * head, heads.ranks), by_head, by_head])
        case Width.TWO:
            return _even([size // 2] * 2, heads.ranks, where)
        case Width.THREE:
            return _even([size // 3] * 3, heads.ranks, where)
        case Width.DELTA:
            keys, key_heads = _number(block, "key_dim"), _number(block, "num_k_heads")
            if key_heads % heads.ranks:
                raise UnsupportedBase(
                    f"{where}: expected a number of key heads that {heads.ranks} GPUs divide, got {key_heads}"
                )
            return _even([keys, keys, size - 2 * keys], heads.ranks, where)
        case Width.MAMBA:
            return _mamba(size, block, heads.ranks, where)


def _even(sizes: Sequence[int], ranks: int, where: str) -> Features:
    """Divide each of several matrices in one into equal parts."""
    if wrong := [size for size in sizes if size % ranks]:
        raise UnsupportedBase(f"{where}: expected a number of features that {ranks} GPUs divide, got {wrong[0]}")
    return Features.joined([Features.even(size, ranks) for size in sizes])


def _mamba(size: int, block: nn.Module, ranks: int, where: str) -> Features:
    """Divide [values, B, C], or [gate, values, B, C, time steps]."""
    groups, values, steps = (_number(block, name) for name in ("n_groups", "intermediate_size", "num_heads"))
    if groups % ranks and groups > 1:
        raise UnsupportedBase(
            f"{where}: expected one group of heads, or a number that {ranks} GPUs divide, got {groups}"
        )
    own, by_group = _even([values], ranks, where), Features.heads(groups, _number(block, "ssm_state_size"), ranks)
    convolved = Features.joined([own, by_group, by_group])
    return convolved if size == convolved.size else Features.joined([own, convolved, _even([steps], ranks, where)])


def _number(module: nn.Module, name: str) -> int:
    found = getattr(module, name)
    assert isinstance(found, int), f"expected {name} of a mixer"
    return found
