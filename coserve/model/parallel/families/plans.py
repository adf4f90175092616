"""The families that can be sharded: Megatron's plan (Shoeybi et al. '19, section 3), as a table of a layer's blocks.

A block is a module whose input every rank needs in full and whose output is a sum over the ranks. Modules of a block
that its table does not name stay whole: per-head norms, routers, the latents of multi-head latent attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from torch import nn


class Width(StrEnum):
    """How the output or input features of a module are divided."""

    EVEN = "even"
    """Equal contiguous parts: whole heads, or features of an MLP."""
    KEY_VALUE = "key_value"
    """Whole key/value heads."""
    QKV = "qkv"
    """Queries, keys and values in one matrix, one after the other; in GPT-BigCode without multi-query attention, head
    by head."""
    TWO = "two"
    """Two matrices of one size in one, such as gate and up projection."""
    THREE = "three"
    """Three matrices of one size in one."""
    DELTA = "delta"
    """Queries, keys and values of a gated delta net in one matrix, by heads."""
    MAMBA = "mamba"
    """Mamba-2's [values, B, C] or [gate, values, B, C, time steps] in one matrix; by heads, B and C by groups. A single
    group is on every rank."""


@dataclass(frozen=True)
class Block:
    """One module of a layer. Paths are those in the block; "" is the block itself."""

    path: str
    column: Mapping[str, Width] = field(default_factory=dict)
    """Linear modules partitioned by output features."""
    row: Mapping[str, Width] = field(default_factory=dict)
    """Linear modules partitioned by input features."""
    experts: str | None = None
    """The module of experts, whose parameters are fused; None: the block has none."""
    vectors: Mapping[str, Width] = field(default_factory=dict)
    """Other parameters that are partitioned along their first dimension, a bias beside a weight like it."""
    stacks: Mapping[str, tuple[int, Width]] = field(default_factory=dict)
    """Parameters that are partitioned along another dimension than the first: the dimension, and how."""
    output_bias: str | None = None
    """The bias of the output of a block that no row-parallel module ends: the block's output is summed over the ranks.
    Rank 0 adds the bias."""
    scales: Mapping[str, Width] = field(default_factory=dict)
    """Buffers that are partitioned along their last dimension."""
    norms: Mapping[str, Width] = field(default_factory=dict)
    """RMS norms over partitioned features:  their mean is taken over all ranks' features (`parallel.modules`)."""
    gates: tuple[str, ...] = ()
    """Replicated linear modules (routers, gates) whose output each rank uses in full, so that each computes its whole
    gradient, without a sum over the ranks."""
    inner_sums: tuple[str, ...] = ()
    """Row-parallel modules in the middle of a block: each rank uses only some features of their sum, so the gradient,
    too, is summed over the ranks."""
    attention: bool = False
    recurrent: bool = False
    """Whether it is a mixer with a recurrent state, which is partitioned like its heads or channels."""

    def fits(self, layer: nn.Module) -> bool:
        """Whether the layer has the block and all of its modules and parameters."""
        named = {name for name, _ in layer.named_modules()} | {name for name, _ in layer.named_parameters()}
        own = {*self.column, *self.row, *self.vectors, *self.stacks, *self.gates, *weights_of(self.norms)}
        return all(joined(self.path, name) in named for name in own | {self.experts or "", self.output_bias or ""})


Plan = Sequence[Block]
"""A family's blocks. Of several for one path, a layer has the first that fits."""


def blocks_of(plan: Plan, layer: nn.Module) -> list[Block]:
    """Return the layer's blocks."""
    return list({block.path: block for block in reversed(plan) if block.fits(layer)}.values())


def joined(path: str, name: str) -> str:
    """Return the path of a block's module in the layer, or, with the block's path in the model, in the model."""
    return f"{path}.{name}" if name else path


def weights_of(norms: Mapping[str, Width]) -> dict[str, Width]:
    """Return the widths of the norms' weights, by name."""
    return {f"{name}.weight": width for name, width in norms.items()}


def _attention(path: str = "self_attn", out: str = "o_proj", **others: Width) -> Block:
    """`others`: more column-parallel modules."""
    column = {"q_proj": Width.EVEN, "k_proj": Width.KEY_VALUE, "v_proj": Width.KEY_VALUE} | others
    return Block(path, column, {out: Width.EVEN}, attention=True)


def _mlp(path: str, up: Sequence[str], down: str) -> Block:
    return Block(path, dict.fromkeys(up, Width.EVEN), {down: Width.EVEN})


def _fused_attention(path: str, width: Width, qkv: str, out: str) -> Block:
    return Block(path, {qkv: width}, {out: Width.EVEN}, attention=True)


def _shared(name: str, *gates: str) -> Block:
    """Return a mixture with a shared expert `name`."""
    column = dict.fromkeys((f"{name}.gate_proj", f"{name}.up_proj"), Width.EVEN)
    return Block("mlp", column, {f"{name}.down_proj": Width.EVEN}, experts="experts", gates=gates)


_SELF_ATTENTION = _attention()
_MLP = _mlp("mlp", ("gate_proj", "up_proj"), "down_proj")
_TWO_IN_ONE = Block("mlp", {"gate_up_proj": Width.TWO}, {"down_proj": Width.EVEN})
_EXPERTS = Block("mlp", experts="experts")
_SHARED_EXPERTS = _shared("shared_experts")
_SHARED_EXPERT = _shared("shared_expert", "shared_expert_gate")
_WIDE_NORMS = replace(_SELF_ATTENTION, norms={"q_norm": Width.EVEN, "k_norm": Width.KEY_VALUE})
_LATENT = Block("self_attn", {"q_b_proj": Width.EVEN, "kv_b_proj": Width.EVEN}, {"o_proj": Width.EVEN}, attention=True)
_WHOLE_QUERY = replace(_LATENT, column={"q_proj": Width.EVEN, "kv_b_proj": Width.EVEN})
_HEAD_NORMS = replace(_SELF_ATTENTION, vectors={"q_norm.weight": Width.EVEN, "k_norm.weight": Width.KEY_VALUE})
_SINKS = replace(_SELF_ATTENTION, vectors={"sinks": Width.EVEN})
_GRANITE_EXPERTS = Block("block_sparse_moe", experts="experts")
_GRANITE_SHARED = Block("shared_mlp", {"input_linear": Width.TWO}, {"output_linear": Width.EVEN})

_DELTA_NET = Block(
    "linear_attn",
    {"in_proj_qkv": Width.DELTA} | dict.fromkeys(("in_proj_z", "in_proj_b", "in_proj_a"), Width.EVEN),
    {"out_proj": Width.EVEN},
    vectors={"conv1d.weight": Width.DELTA, "dt_bias": Width.EVEN, "A_log": Width.EVEN},
    recurrent=True,
)
_DELTA_NET_BY_MATRIX = replace(
    _DELTA_NET,
    column=dict.fromkeys(("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj"), Width.EVEN),
    row={"o_proj": Width.EVEN},
)
_DELTA_NET_BY_HEAD = replace(_DELTA_NET, column={"in_proj_qkvz": Width.EVEN, "in_proj_ba": Width.EVEN})
_MAMBA = Block(
    "mamba",
    {"in_proj": Width.MAMBA},
    {"out_proj": Width.EVEN},
    vectors={"conv1d.weight": Width.MAMBA} | dict.fromkeys(("dt_bias", "A_log", "D"), Width.EVEN),
    norms={"norm": Width.EVEN},
    recurrent=True,
)
_SCALED_MAMBA = replace(_MAMBA, scales={"mup_vector": Width.MAMBA})
_MAMBA1 = Block(
    "mamba",
    {"in_proj": Width.TWO, "dt_proj": Width.EVEN},
    {"x_proj": Width.EVEN, "out_proj": Width.EVEN},
    vectors=dict.fromkeys(("conv1d.weight", "A_log", "D"), Width.EVEN),
    inner_sums=("x_proj",),
    recurrent=True,
)
_SHORT_CONVOLUTION = Block(
    "conv", {"in_proj": Width.THREE}, {"out_proj": Width.EVEN}, vectors={"conv.weight": Width.EVEN}, recurrent=True
)
_FEED_FORWARD = _mlp("feed_forward", ("gate_proj", "up_proj"), "down_proj")
_FEED_FORWARD_EXPERTS = Block("feed_forward", experts="experts")
_LFM2_MLP = _mlp("feed_forward", ("w1", "w3"), "w2")

_LLAMA = (_SELF_ATTENTION, _MLP)
_UNGATED = (_SELF_ATTENTION, _mlp("mlp", ("up_proj",), "down_proj"))
_GLM = (_SELF_ATTENTION, _TWO_IN_ONE)
_MIXTURE = (_SELF_ATTENTION, _EXPERTS, _MLP)
_DEEPSEEK = (_LATENT, _WHOLE_QUERY, _SHARED_EXPERTS, _MLP)
_WITH_SHARED = (_SELF_ATTENTION, _SHARED_EXPERTS, _EXPERTS, _MLP)
_LFM2 = (_attention(out="out_proj"), _SHORT_CONVOLUTION, _LFM2_MLP, _FEED_FORWARD_EXPERTS)
_QWEN35 = (_DELTA_NET, _DELTA_NET_BY_HEAD, _SELF_ATTENTION, _SHARED_EXPERT, _MLP)
_JETMOE = (
    Block(
        "self_attention",
        {"kv_proj": Width.TWO},
        stacks={"experts.input_linear.weight": (1, Width.EVEN), "experts.output_linear.weight": (2, Width.EVEN)},
        output_bias="experts.bias",
        attention=True,
    ),
    Block(
        "mlp",
        stacks={"input_linear.weight": (1, Width.TWO), "output_linear.weight": (2, Width.EVEN)},
        output_bias="bias",
    ),
)
_KEYS_AS_VALUES = replace(_SELF_ATTENTION, column={"q_proj": Width.EVEN, "k_proj": Width.KEY_VALUE})
_QUERIES_ALONE = replace(_SELF_ATTENTION, column={"q_proj": Width.EVEN})
"""Attention of layers that read the keys and values of earlier ones."""
_GEMMA4 = (
    *(_SELF_ATTENTION, _KEYS_AS_VALUES, _QUERIES_ALONE, _MLP, Block("router"), Block("experts", experts="")),
    *(Block(name, gates=("",)) for name in ("per_layer_input_gate", "per_layer_projection")),
)
_GPT2 = (_fused_attention("attn", Width.QKV, "c_attn", "c_proj"), _mlp("mlp", ("c_fc",), "c_proj"))
_LLAMA4 = (_SELF_ATTENTION, replace(_shared("shared_expert"), path="feed_forward"), _FEED_FORWARD)
_PHI3 = (_fused_attention("self_attn", Width.QKV, "qkv_proj", "o_proj"), _TWO_IN_ONE)
_GRANITE = (_SELF_ATTENTION, _GRANITE_EXPERTS, _GRANITE_SHARED)

PLANS: Mapping[str, Plan] = {
    "afmoe": (_attention(gate_proj=Width.EVEN), _SHARED_EXPERTS, _EXPERTS, _MLP),
    "apertus": _UNGATED,
    "arcee": _UNGATED,
    "axk1": _DEEPSEEK,
    "aya_vision": _LLAMA,
    "bamba": (_MAMBA, _SELF_ATTENTION, _FEED_FORWARD),
    "bitnet": (
        replace(_SELF_ATTENTION, norms={"attn_sub_norm": Width.EVEN}),
        replace(_MLP, norms={"ffn_sub_norm": Width.EVEN}),
    ),
    "cohere": (_HEAD_NORMS, *_LLAMA),
    "cohere2": _LLAMA,
    "cohere2_moe": _MIXTURE,
    "cohere2_vision": _LLAMA,
    "ctrl": (
        Block(
            "multi_head_attention",
            dict.fromkeys(("Wq", "Wk", "Wv"), Width.EVEN),
            {"dense": Width.EVEN},
            attention=True,
        ),
        _mlp("ffn", ("0",), "2"),
    ),
    "cwm": _LLAMA,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "dots1": _WITH_SHARED,
    "ernie4_5": _LLAMA,
    "ernie4_5_moe": _WITH_SHARED,
    "exaone4": _LLAMA,
    "exaone4_5": _LLAMA,
    "exaone_moe": _WITH_SHARED,
    "falcon_h1": (_SCALED_MAMBA, replace(_SCALED_MAMBA, norms={}), _SELF_ATTENTION, _FEED_FORWARD),
    "flex_olmo": (_WIDE_NORMS, _EXPERTS),
    "gemma": _LLAMA,
    "gemma2": _LLAMA,
    "gemma3": _LLAMA,
    "gemma3_text": _LLAMA,
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "gemma4_unified": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "glm": _GLM,
    "glm4": _GLM,
    "glm46v": _GLM,
    "glm4_moe": _WITH_SHARED,
    "glm4_moe_lite": _DEEPSEEK,
    "glm4v": _GLM,
    "glm4v_moe": _WITH_SHARED,
    "glm_ocr": _GLM,
    "got_ocr2": _LLAMA,
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neox": (
        _fused_attention("attention", Width.EVEN, "query_key_value", "dense"),
        _mlp("mlp", ("dense_h_to_4h",), "dense_4h_to_h"),
    ),
    "gpt_oss": (_SINKS, _EXPERTS),
    "granite": _LLAMA,
    "granite_swa": (_SINKS, _MLP),
    "granitemoe": _GRANITE,
    "granitemoe_swa": (_SINKS, _GRANITE_EXPERTS),
    "granitemoehybrid": (_MAMBA, *_GRANITE),
    "granitemoeshared": _GRANITE,
    "helium": _LLAMA,
    "hunyuan_v1_dense": _LLAMA,
    "hunyuan_v1_moe": (_SELF_ATTENTION, _shared("shared_mlp")),
    "hunyuan_vl": _LLAMA,
    "hy_v3": _WITH_SHARED,
    "hyperclovax": _LLAMA,
    "idefics2": _LLAMA,
    "idefics3": _LLAMA,
    "internvl": _LLAMA,
    "jais2": _UNGATED,
    "jamba": (_MAMBA1, _SELF_ATTENTION, _FEED_FORWARD_EXPERTS, _FEED_FORWARD),
    "jetmoe": _JETMOE,
    "kimi_k25": _DEEPSEEK,
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "lfm2_vl": _LFM2,
    "lighton_ocr": _LLAMA,
    "llama": _LLAMA,
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "llava": _LLAMA,
    "llava_next": _LLAMA,
    "llava_next_video": _LLAMA,
    "llava_onevision": _LLAMA,
    "mellum": _MIXTURE,
    "mimo_v2_flash": (_SINKS, *_MIXTURE),
    "minicpm3": _DEEPSEEK,
    "minimax_m2": (_WIDE_NORMS, _EXPERTS),
    "ministral": _LLAMA,
    "ministral3": _LLAMA,
    "mistral": _LLAMA,
    "mistral3": _LLAMA,
    "mistral4": _DEEPSEEK,
    "mixtral": _MIXTURE,
    "modernbert-decoder": (_attention("attn", "Wo"), Block("mlp", {"Wi": Width.TWO}, {"Wo": Width.EVEN})),
    "nanochat": (_SELF_ATTENTION, _mlp("mlp", ("fc1",), "fc2")),
    "nemotron_h": (
        replace(_MAMBA, path="mixer"),
        _attention("mixer"),
        Block(
            "mixer", {"shared_experts.up_proj": Width.EVEN}, {"shared_experts.down_proj": Width.EVEN}, experts="experts"
        ),
        _mlp("mixer", ("up_proj",), "down_proj"),
    ),
    "olmo": _LLAMA,
    "olmo2": (_WIDE_NORMS, _MLP),
    "olmo3": (_WIDE_NORMS, _MLP),
    "olmo_hybrid": (_DELTA_NET_BY_MATRIX, _WIDE_NORMS, _MLP),
    "olmoe": (_WIDE_NORMS, _EXPERTS),
    "opt": (_attention(out="out_proj"), Block("fc1", {"": Width.EVEN}), Block("fc2", row={"": Width.EVEN})),
    "ovis2": _LLAMA,
    "paddleocr_vl": _LLAMA,
    "persimmon": (
        _fused_attention("self_attn", Width.EVEN, "query_key_value", "dense"),
        _mlp("mlp", ("dense_h_to_4h",), "dense_4h_to_h"),
    ),
    "phi": (_attention(out="dense"), _mlp("mlp", ("fc1",), "fc2")),
    "phi3": _PHI3,
    "phi4_multimodal": _PHI3,
    "phimoe": _MIXTURE,
    "qwen2": _LLAMA,
    "qwen2_5_vl": _LLAMA,
    "qwen2_moe": (_SELF_ATTENTION, _SHARED_EXPERT, _MLP),
    "qwen2_vl": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3_5": _QWEN35,
    "qwen3_5_moe": _QWEN35,
    "qwen3_5_moe_text": _QWEN35,
    "qwen3_5_text": _QWEN35,
    "qwen3_moe": _MIXTURE,
    "qwen3_next": _QWEN35,
    "qwen3_vl": _LLAMA,
    "qwen3_vl_moe": _MIXTURE,
    "seed_oss": _LLAMA,
    "smollm3": _LLAMA,
    "smolvlm": _LLAMA,
    "solar_open": _WITH_SHARED,
    "starcoder2": (_SELF_ATTENTION, _mlp("mlp", ("c_fc",), "c_proj")),
    "vaultgemma": _LLAMA,
    "youtu": _DEEPSEEK,
}
"""Plans by the config's `model_type`. Each is tested: `tests/model/parallel/test_families.py`."""
