"""How llama.cpp writes each family: keys of settings, names of tensors, and changes of their numbers.

Data for `gguf.py`, learnt from llama.cpp's converter (its folder `conversion`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig

from coserve.core.errors import UnsupportedBase
from coserve.data.pretrained.gguf import GgufHeader
from coserve.model.formats.gguf_changes import (
    Change,
    by_heads,
    by_key_heads,
    by_pairs,
    decay,
    in_turns,
    joined,
    plus_one,
    transposed,
)

Settings = dict[str, object]
Derive = Callable[[GgufHeader, Settings], Settings]
"""Derives settings that no metadata key holds, from the file and the settings read so far."""


@dataclass(frozen=True)
class Layout:
    """How llama.cpp writes one architecture."""

    family: str
    """transformers' `model_type`."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Metadata keys, without the architecture, by setting; besides `COMMON`. Of a list the largest number counts."""
    changes: Mapping[str, Change] = field(default_factory=dict)
    """Changes by suffix of parameter names; the first match applies. Others: stored tensors concatenated by rows."""
    derive: Derive = lambda _header, _settings: {}


COMMON = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
NAMES = {
    ".sinks": ("attn_sinks.weight",),
    ".layer_scalar": ("layer_output_scale.weight",),
    ".router.scale": ("ffn_gate_inp.scale",),
    ".router.per_expert_scale": ("ffn_down_exps.scale",),
    ".router.proj.weight": ("ffn_gate_inp.weight",),
    ".A_log": ("ssm_a",),
    ".D": ("ssm_d",),
    ".dt_bias": ("ssm_dt.bias",),
    ".in_proj_qkvz.weight": ("attn_gate.weight", "attn_qkv.weight", "ssm_in.weight"),
    ".input_linear.weight": ("ffn_gate_shexp.weight", "ffn_up_shexp.weight", "ffn_gate.weight", "ffn_up.weight"),
    ".output_linear.weight": ("ffn_down_shexp.weight", "ffn_down.weight"),
    ".router.weight": ("ffn_gate_inp.weight",),
    ".e_score_correction_bias": ("exp_probs_b.bias",),
    ".expert_bias": ("exp_probs_b.bias",),
    ".experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_gate_up_exps.weight"),
    ".experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    ".experts.up_proj": ("ffn_up_exps.weight",),
    ".experts.down_proj": ("ffn_down_exps.weight",),
    ".experts.down_proj_bias": ("ffn_down_exps.bias",),
}
"""Names of a layer's tensors that the `gguf` package's table lacks, by suffix of the model's parameter names."""


_PAIRS: dict[str, Change] = {
    f"{projection}_proj.{part}": by_pairs(heads)
    for projection, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"))
    for part in ("weight", "bias")
}
_PARTIAL = {"partial_rotary_factor": "rope.dimension_count"}
_GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


_EXPERTS = {"num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length"}
_ROUTED = _EXPERTS | {
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
_DELTA = {
    "full_attention_interval": "full_attention_interval",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
_SHARED_EXPERTS = _EXPERTS | {
    "num_experts": "expert_count",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
_DELTA_EXPERTS = _DELTA | _SHARED_EXPERTS
_DELTA_NORMS: dict[str, Change] = {"linear_attn.norm.weight": joined, "norm.weight": plus_one}
_QWEN35: dict[str, Change] = {
    ".A_log": by_key_heads(decay),
    ".dt_bias": by_key_heads(),
    ".conv1d.weight": by_key_heads(behind_keys=True),
    ".in_proj_qkv.weight": by_key_heads(behind_keys=True),
    ".in_proj_z.weight": by_key_heads(),
    ".in_proj_a.weight": by_key_heads(),
    ".in_proj_b.weight": by_key_heads(),
    ".linear_attn.out_proj.weight": by_key_heads(dim=1),
}
_QWEN35 |= _DELTA_NORMS


def _list(header: GgufHeader, key: str) -> list[int]:
    """Return a setting's value for each layer."""
    found, count = header.metadata.get(f"{header.architecture}.{key}"), layers(header)
    numbers = found if isinstance(found, list) else [found or 0] * count
    return [int(one) for one in numbers if isinstance(one, int)][:count]


def _inner(header: GgufHeader, heads: object) -> int:
    """Return the size of a recurrent layer's heads."""
    return (header.number(f"{header.architecture}.ssm.inner_size") or 0) // int(str(heads))


def _llama(header: GgufHeader, settings: Settings) -> Settings:
    """Mixtral's files are Llama's with experts."""
    return {"model_type": "mixtral"} if settings.get("num_local_experts") else {}


def _lfm2(header: GgufHeader, _settings: Settings) -> Settings:
    kinds = ["full_attention" if heads else "conv" for heads in _list(header, "attention.head_count_kv")]
    return {"layer_types": kinds} | ({"block_auto_adjust_ff_dim": False} if header.architecture == "lfm2" else {})


def _phi3(header: GgufHeader, settings: Settings) -> Settings:
    return {"sliding_window": settings.get("sliding_window") or None}


def _gemma(header: GgufHeader, settings: Settings) -> Settings:
    """27B models scale queries by hidden size / heads, others by the head size."""
    whole = int(str(settings["hidden_size"])) // int(str(settings["num_attention_heads"]))
    large = {"gemma2": 46, "gemma3": 62}.get(header.architecture) == settings["num_hidden_layers"]
    return {"query_pre_attn_scalar": whole if large else settings["head_dim"]}


def _minimax(header: GgufHeader, _settings: Settings) -> Settings:
    gate = header.number("minimax-m2.expert_gating_func")
    return {"use_routing_bias": True, "scoring_func": "sigmoid" if gate == 2 else "softmax"}


def _delta(header: GgufHeader, settings: Settings) -> Settings:
    return {"linear_value_head_dim": _inner(header, settings["linear_num_value_heads"])}


def _granite_moe(header: GgufHeader, settings: Settings) -> Settings:
    shared = header.number(f"{header.architecture}.expert_shared_feed_forward_length")
    return {} if shared is None else {"model_type": "granitemoeshared", "shared_intermediate_size": shared}


def _granite_hybrid(header: GgufHeader, settings: Settings) -> Settings:
    """A layer with key heads has attention, others Mamba-2."""
    shared = header.number("granitehybrid.expert_shared_feed_forward_length") or settings["intermediate_size"]
    inner = header.number("granitehybrid.ssm.inner_size") or 0
    if header.metadata.get("granitehybrid.rope.scaling.finetuned") is True:
        raise UnsupportedBase("model: its layers turn queries and keys by position, which are Bamba's, not Granite's")
    return {
        "layer_types": ["attention" if one else "mamba" for one in _list(header, "attention.head_count_kv")],
        "mamba_d_head": _inner(header, settings["mamba_n_heads"]),
        "mamba_expand": inner // int(str(settings["hidden_size"])),
        "num_local_experts": header.number("granitehybrid.expert_count") or 0,
        "position_embedding_type": "nope",
        "shared_intermediate_size": shared,
    }


def _nemotron_h(header: GgufHeader, settings: Settings) -> Settings:
    """A layer with key heads has attention, one with a feed-forward size only that, others Mamba-2."""
    forward = "moe" if "n_routed_experts" in settings else "mlp"
    sizes = zip(_list(header, "attention.head_count_kv"), _list(header, "feed_forward_length"), strict=True)
    kinds = ["attention" if heads else forward if width else "mamba" for heads, width in sizes]
    return {"layers_block_type": kinds, "mamba_head_dim": _inner(header, settings["mamba_num_heads"])}


_MAMBA: dict[str, Change] = {".A_log": decay} | _PAIRS
_NEMOTRON_H = {
    "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
    "conv_kernel": "ssm.conv_kernel",
    "ssm_state_size": "ssm.state_size",
    "n_groups": "ssm.group_count",
    "mamba_num_heads": "ssm.time_step_rank",
}


def _mistral(header: GgufHeader, _settings: Settings) -> Settings:
    """Ministral 3 scales queries by position; older models are Mistral's. Neither has windows."""
    scaled = "mistral3.attention.temperature_scale" in header.metadata
    return {"model_type": "ministral3" if scaled else "mistral", "sliding_window": None}


def _gemma4(header: GgufHeader, settings: Settings) -> Settings:
    """Layers without a window have another head size and number of heads, and no value projection if values equal
    keys. The last layers, which may have no keys and values of their own, may be twice as wide."""
    windows, heads = _list(header, "attention.sliding_window_pattern"), _list(header, "attention.head_count_kv")
    last, own = len(windows) - 1, len(windows) - (header.number("gemma4.attention.shared_kv_layers") or 0)
    without_window = max(layer for layer in range(own) if not windows[layer])
    narrow, wide = (header.tensors[f"blk.{layer}.ffn_gate.weight"].shape[0] for layer in (0, last))
    sizes = {"head_dim": header.number("gemma4.attention.key_length_swa"), "global_head_dim": settings["head_dim"]}
    sizes |= {"num_key_value_heads": heads[windows.index(1)], "num_global_key_value_heads": heads[last]}
    freqs, ends = header.tensors["rope_freqs.weight"], ("<eos>", "<turn|>", "<|tool_response>")
    divisors = np.fromfile(freqs.path, np.float32, freqs.shape[0], offset=freqs.start)
    local = {"rope_type": "default", "rope_theta": header.metadata.get("gemma4.rope.freq_base_swa", 10000.0)}
    whole = {"rope_type": "proportional", "rope_theta": settings["rope_theta"]}
    whole |= {"partial_rotary_factor": float((divisors == 1).mean())}
    tokens, inputs = header.metadata.get("tokenizer.ggml.tokens"), header.tensors.get("per_layer_token_embd.weight")
    found = [tokens.index(end) for end in ends if end in tokens] if isinstance(tokens, list) else []
    return sizes | {
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "attention_k_eq_v": f"blk.{without_window}.attn_v.weight" not in header.tensors,
        "intermediate_size": narrow,
        "use_double_wide_mlp": wide > narrow,
        "enable_moe_block": bool(settings.get("num_experts")),
        "rope_parameters": {"sliding_attention": local, "full_attention": whole},
        **({"eos_token_id": found} if found else {}),
        **({} if inputs is None else {"vocab_size_per_layer_input": inputs.shape[0]}),
    }


def _glm(header: GgufHeader, _settings: Settings) -> Settings:
    if "glm4.rope.dimension_sections" in header.metadata:
        raise UnsupportedBase("model: the text of GLM-4V has positions of images, which are not read from GGUF")
    return {}


def _glm_moe(header: GgufHeader, _settings: Settings) -> Settings:
    return {"use_qk_norm": any(name.endswith("attn_q_norm.weight") for name in header.tensors)}


def _olmo(header: GgufHeader, settings: Settings) -> Settings:
    """OLMo 3 is OLMo 2 with windows in some layers; an extended context does not scale those layers' rotary
    frequencies."""
    windows = header.metadata.get("olmo2.attention.sliding_window_pattern")
    if not isinstance(windows, list):
        return {}
    rotary = {"rope_type": "default", "rope_theta": settings["rope_theta"]}
    kinds = ["sliding_attention" if one else "full_attention" for one in windows]
    parameters = {kind: dict(rotary) for kind in ("sliding_attention", "full_attention")}
    window = header.metadata["olmo2.attention.sliding_window"]
    return {"model_type": "olmo3", "layer_types": kinds, "sliding_window": window, "rope_parameters": parameters}


_EXPERT_COUNTS = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_CONVOLUTIONS = {"norm_eps": COMMON["rms_norm_eps"], "conv_L_cache": "shortconv.l_cache"}
_WINDOW = {"sliding_window": "attention.sliding_window"}
_NORMS: dict[str, Change] = {"norm.weight": plus_one}
LAYOUTS: dict[str, Layout] = {
    "llama": Layout("llama", {"head_dim": "rope.dimension_count"} | _EXPERT_COUNTS, _PAIRS, _llama),
    "qwen2": Layout("qwen2"),
    "qwen2moe": Layout("qwen2_moe", _SHARED_EXPERTS),
    "qwen3": Layout("qwen3"),
    "qwen3moe": Layout(
        "qwen3_moe", _EXPERTS | {"num_experts": "expert_count"}, derive=lambda *_: {"norm_topk_prob": True}
    ),
    "gemma": Layout("gemma", changes=_NORMS),
    "gemma2": Layout("gemma2", _WINDOW, _NORMS, _gemma),
    "gemma3": Layout("gemma3_text", _WINDOW, _NORMS, _gemma),
    "phi3": Layout("phi3", _WINDOW, derive=_phi3),
    "lfm2": Layout("lfm2", _CONVOLUTIONS, derive=_lfm2),
    "lfm2moe": Layout(
        "lfm2_moe",
        _CONVOLUTIONS | _EXPERTS | {"num_experts": "expert_count", "num_dense_layers": "leading_dense_block_count"},
        derive=_lfm2,
    ),
    "olmoe": Layout("olmoe", {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}),
    "gpt2": Layout(
        "gpt2",
        {"layer_norm_epsilon": "attention.layer_norm_epsilon", "n_inner": "feed_forward_length"},
        dict.fromkeys(("c_attn.weight", "c_proj.weight", "c_fc.weight"), transposed),
    ),
    "starcoder2": Layout("starcoder2", {"norm_epsilon": "attention.layer_norm_epsilon"}),
    "minimax-m2": Layout("minimax_m2", _EXPERT_COUNTS | {"rotary_dim": "rope.dimension_count"}, derive=_minimax),
    "smollm3": Layout("smollm3", changes=_PAIRS),
    "granite": Layout("granite", _GRANITE, _PAIRS),
    "gpt-oss": Layout(
        "gpt_oss",
        _EXPERT_COUNTS | _WINDOW,
        dict.fromkeys(("_proj", "_proj_bias"), in_turns),
    ),
    "olmo2": Layout("olmo2", derive=_olmo),
    "seed_oss": Layout("seed_oss"),
    "mistral3": Layout("mistral", changes=_PAIRS, derive=_mistral),
    "gemma4": Layout(
        "gemma4_text",
        {
            "sliding_window": "attention.sliding_window",
            "final_logit_softcapping": "final_logit_softcapping",
            "hidden_size_per_layer_input": "embedding_length_per_layer_input",
            "num_kv_shared_layers": "attention.shared_kv_layers",
            "num_experts": "expert_count",
            "top_k_experts": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        derive=_gemma4,
    ),
    "glm4": Layout("glm4", _PARTIAL, derive=_glm),
    "glm4moe": Layout(
        "glm4_moe", _PARTIAL | _ROUTED | {"first_k_dense_replace": "leading_dense_block_count"}, derive=_glm_moe
    ),
    "qwen35": Layout("qwen3_5_text", _PARTIAL | _DELTA, _QWEN35, _delta),
    "qwen35moe": Layout("qwen3_5_moe_text", _PARTIAL | _DELTA_EXPERTS, _QWEN35, _delta),
    "qwen3next": Layout(
        "qwen3_next",
        _PARTIAL | _DELTA_EXPERTS,
        {".A_log": decay, ".in_proj_qkvz.weight": by_heads} | _DELTA_NORMS,
        _delta,
    ),
    "granitemoe": Layout(
        "granitemoe",
        _GRANITE | _EXPERT_COUNTS,
        _PAIRS,
        _granite_moe,
    ),
    "granitehybrid": Layout(
        "granitemoehybrid",
        _GRANITE
        | {
            "num_experts_per_tok": "expert_used_count",
            "mamba_d_conv": "ssm.conv_kernel",
            "mamba_d_state": "ssm.state_size",
            "mamba_n_groups": "ssm.group_count",
            "mamba_n_heads": "ssm.time_step_rank",
        },
        _MAMBA,
        _granite_hybrid,
    ),
    "nemotron_h": Layout("nemotron_h", _NEMOTRON_H, _MAMBA, _nemotron_h),
    "nemotron_h_moe": Layout(
        "nemotron_h",
        _NEMOTRON_H
        | _ROUTED
        | {
            "moe_latent_size": "moe_latent_size",
            "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
        _MAMBA,
        _nemotron_h,
    ),
}


REFUSED = {
    "gemma3n": "its several hidden states of a token are not implemented there",
    **dict.fromkeys(
        ("bloom", "falcon", "mamba", "nemotron", "stablelm"),
        "coserve does not serve the family (docs/guide/families.md)",
    ),
}
"""Architectures that users may expect but that are refused, with the reason."""


def settings_of(header: GgufHeader) -> Settings:
    """Return the config's settings that the file of one of `LAYOUTS` has, `model_type` among them."""
    kind, layout = header.architecture, LAYOUTS[header.architecture]
    found: Settings = {"model_type": layout.family, "num_hidden_layers": layers(header)}
    for name, key in (COMMON | dict(layout.settings)).items():
        value = header.metadata.get(f"{kind}.{key}")
        if value is not None:
            found[name] = max(_list(header, key)) if isinstance(value, list) else value
    if missing := [COMMON[name] for name in ("hidden_size", "num_attention_heads") if name not in found]:
        raise UnsupportedBase(f"model: expected the setting {kind}.{missing[0]} in the file")
    hidden, heads = (int(str(found[name])) for name in ("hidden_size", "num_attention_heads"))
    head = header.number(f"{kind}.attention.key_length") or int(str(found.get("head_dim", hidden // heads)))
    found["head_dim"] = head
    if "partial_rotary_factor" in found:
        found["partial_rotary_factor"] = int(str(found["partial_rotary_factor"])) / head
    if hasattr(CONFIG_MAPPING[layout.family], "attention_bias"):
        found["attention_bias"] = any(name.endswith("attn_q.bias") for name in header.tensors)
    return found | layout.derive(header, found)


def stored_as(name: str) -> list[str]:
    """Return the file's names for a parameter of `NAMES`; none for others."""
    found = next((names for end, names in NAMES.items() if name.endswith(end)), ())
    return [f"blk.{name.split('.')[2]}.{one}" for one in found]


def made(layout: Layout, name: str, parts: Sequence[Tensor], config: PretrainedConfig) -> Tensor:
    """Make a parameter from its stored tensors, sorted by their names."""
    change = next((change for end, change in layout.changes.items() if name.endswith(end)), joined)
    return change(parts, config)


def behind(header: GgufHeader, name: str) -> bool:
    """Whether a tensor belongs to multi-token prediction layers, which follow the model's own and are not served."""
    block, _, rest = name.partition(".")
    further = header.number(f"{header.architecture}.nextn_predict_layers") or 0
    return further > 0 and block == "blk" and int(rest.partition(".")[0]) >= layers(header)


def layers(header: GgufHeader) -> int:
    """Return the number of the model's layers, without multi-token prediction layers."""
    kind = header.architecture
    return (header.number(f"{kind}.block_count") or 0) - (header.number(f"{kind}.nextn_predict_layers") or 0)
