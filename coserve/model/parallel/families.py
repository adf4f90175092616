"""The families that can be sharded: Megatron's plan (Shoeybi et al. '19, section 3), one small table for each kind of
layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from transformers import PretrainedConfig

from coserve.core.errors import UnsupportedBase
from coserve.model.parallel.partition import Features, Parallel, SitePartition


class Width(StrEnum):
    """The dimension of a layer along which a module is partitioned."""

    QUERY = "query"
    KEY_VALUE = "key_value"
    QKV = "qkv"
    """Queries, keys and values in one matrix."""
    MLP = "mlp"
    GATE_UP = "gate_up"
    """Gate and up projection in one matrix."""


@dataclass(frozen=True)
class Plan:
    """A layer's linear modules, by their path in it, and the two modules whose input every rank needs in full."""

    column: Mapping[str, Width]
    row: Mapping[str, Width]
    blocks: tuple[str, str]
    experts: str = ""
    """The module of experts, whose parameters are fused; empty: the layer has none."""
    heads: tuple[str, ...] = ()
    """Vectors with an element for each query head."""


_ATTENTION = {
    "self_attn.q_proj": Width.QUERY,
    "self_attn.k_proj": Width.KEY_VALUE,
    "self_attn.v_proj": Width.KEY_VALUE,
}
_LLAMA = Plan(
    column=_ATTENTION | {"mlp.gate_proj": Width.MLP, "mlp.up_proj": Width.MLP},
    row={"self_attn.o_proj": Width.QUERY, "mlp.down_proj": Width.MLP},
    blocks=("self_attn", "mlp"),
)
_PHI = Plan(
    column=_ATTENTION | {"mlp.fc1": Width.MLP},
    row={"self_attn.dense": Width.QUERY, "mlp.fc2": Width.MLP},
    blocks=("self_attn", "mlp"),
)
_PHI3 = Plan(
    column={"self_attn.qkv_proj": Width.QKV, "mlp.gate_up_proj": Width.GATE_UP},
    row={"self_attn.o_proj": Width.QUERY, "mlp.down_proj": Width.MLP},
    blocks=("self_attn", "mlp"),
)
_GPT2 = Plan(
    column={"attn.c_attn": Width.QKV, "mlp.c_fc": Width.MLP},
    row={"attn.c_proj": Width.QUERY, "mlp.c_proj": Width.MLP},
    blocks=("attn", "mlp"),
)

_GLM = replace(_LLAMA, column=_ATTENTION | {"mlp.gate_up_proj": Width.GATE_UP})
_NO_GATE = replace(_LLAMA, column=_ATTENTION | {"mlp.up_proj": Width.MLP})
_STARCODER2 = Plan(
    column=_ATTENTION | {"mlp.c_fc": Width.MLP},
    row={"self_attn.o_proj": Width.QUERY, "mlp.c_proj": Width.MLP},
    blocks=("self_attn", "mlp"),
)
_EXPERTS = Plan(
    column=_ATTENTION, row={"self_attn.o_proj": Width.QUERY}, blocks=("self_attn", "mlp"), experts="mlp.experts"
)

PLANS: Mapping[str, Plan] = {
    "arcee": _NO_GATE,
    "cohere": _LLAMA,
    "cohere2": _LLAMA,
    "cwm": _LLAMA,
    "ernie4_5": _LLAMA,
    "exaone4": _LLAMA,
    "gemma": _LLAMA,
    "gemma2": _LLAMA,
    "gemma3_text": _LLAMA,
    "glm": _GLM,
    "glm4": _GLM,
    "gpt2": _GPT2,
    "gpt_oss": replace(_EXPERTS, heads=("self_attn.sinks",)),
    "granite": _LLAMA,
    "helium": _LLAMA,
    "hunyuan_v1_dense": _LLAMA,
    "llama": _LLAMA,
    "ministral": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _EXPERTS,
    "olmo": _LLAMA,
    "phi": _PHI,
    "phi3": _PHI3,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3_moe": _EXPERTS,
    "seed_oss": _LLAMA,
    "smollm3": _LLAMA,
    "starcoder2": _STARCODER2,
    "vaultgemma": _LLAMA,
}
"""Plans by the config's `model_type`. Each is tested: `tests/model/parallel/test_families.py`."""


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
    if ranks > 1 and getattr(text, "use_qk_norm", False):
        raise UnsupportedBase(
            f"{family}: use_qk_norm has a weight for each head, which is not sharded; run it on one GPU"
        )
    heads = heads_of(config, ranks)
    sizes = {"query heads": heads.query, "hidden features": text.hidden_size}
    if not plan.experts:
        sizes["features of the MLP"] = mlp_width(config)
    for name, size in sizes.items():
        if size % ranks:
            raise UnsupportedBase(f"{family}: expected a number of {name} that {ranks} GPUs divide, got {size}")
    fused = Width.QKV in plan.column.values()
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


def mlp_width(config: PretrainedConfig) -> int:
    text = config.get_text_config()
    if text.model_type == "gpt2":
        return int(text.n_inner or 4 * text.hidden_size)
    return int(text.intermediate_size)


def layer_partitions(config: PretrainedConfig, plan: Plan, ranks: int) -> dict[str, SitePartition]:
    """Return the partition of each of a layer's linear modules, by its path in the layer."""
    heads, width = heads_of(config, ranks), 0 if plan.experts else mlp_width(config)
    mlp = Features.even(width, ranks)
    query = Features.heads(heads.query, heads.size, ranks)
    key_value = Features.heads(heads.key_value, heads.size, ranks)
    widths = {
        Width.QUERY: query,
        Width.KEY_VALUE: key_value,
        Width.QKV: Features.joined([query, key_value, key_value]),
        Width.MLP: mlp,
        Width.GATE_UP: Features.joined([mlp, mlp]),
    }
    hidden = Features.whole(config.get_text_config().hidden_size, ranks)
    column = {path: SitePartition(Parallel.COLUMN, hidden, widths[width]) for path, width in plan.column.items()}
    return column | {path: SitePartition(Parallel.ROW, widths[width], hidden) for path, width in plan.row.items()}
