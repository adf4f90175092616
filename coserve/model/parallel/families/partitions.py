"""How the layers of a family are sharded: the partition of each module that its plan names, and what cannot be
divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from coserve.core.errors import UnsupportedBase
from coserve.model.parallel.families.plans import PLANS, Block, Plan, Width, blocks_of
from coserve.model.parallel.partition import Features, Parallel, SitePartition


@dataclass(frozen=True)
class Heads:
    """Numbers of attention heads, in a whole layer and on one rank."""

    query: int
    key_value: int
    size: int
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
    heads = heads_of(config, ranks)
    for name, size in {"query heads": heads.query, "hidden features": text.hidden_size}.items():
        if size % ranks:
            raise UnsupportedBase(f"{family}: expected a number of {name} that {ranks} GPUs divide, got {size}")
    fused = any(Width.QKV in block.column.values() for block in plan)
    if heads.key_value % ranks and (fused or ranks % heads.key_value):
        raise UnsupportedBase(
            f"{family}: expected a number of key/value heads that {ranks} GPUs divide"
            f"{'' if fused else ', or that divides them'}, got {heads.key_value}"
        )
    return plan


def heads_of(config: PretrainedConfig, ranks: int) -> Heads:
    text = config.get_text_config()
    query: int = text.num_attention_heads
    return Heads(
        query=query,
        key_value=getattr(text, "num_key_value_heads", None) or query,
        size=getattr(text, "head_dim", None) or text.hidden_size // query,
        ranks=ranks,
    )


def planned_blocks(plan: Plan, layer: nn.Module, path: str) -> list[Block]:
    """Return the blocks of the layer at `path`. Raises `UnsupportedBase` for a linear module that is in none of
    them."""
    blocks = blocks_of(plan, layer)
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and not name.startswith(tuple(f"{one.path}." for one in blocks)):
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
        where = f"{path}.{name}"
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
    widths = {**block.vectors, **{f"{name}.weight": width for name, width in block.norms.items()}}
    widths |= {f"{name.removesuffix('weight')}bias": width for name, width in widths.items() if name.endswith("weight")}
    sizes = {name: parameter.shape[0] for name, parameter in module.named_parameters() if name in widths}
    return {name: features(widths[name], size, heads, f"{path}.{name}", module) for name, size in sizes.items()}


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
            head = size // (query + 2 * key_value)
            return _even([query * head, key_value * head, key_value * head], heads.ranks, where)
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
