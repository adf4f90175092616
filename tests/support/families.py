"""One tiny random config of every family that docs/guide/families.md names: those that are served, and those that are
refused."""

from __future__ import annotations

import dataclasses
from unittest.mock import patch

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    Gemma3nConfig,
    PretrainedConfig,
    PreTrainedModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from transformers.models.gemma3n import modeling_gemma3n

from coserve.model.wrappers import model_class

VOCAB = 128

_SHAPE: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "sliding_window": 5,
    "attention_chunk_size": 6,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "rotary_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
    # Of the families with experts.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
"""Each config takes those that it knows."""

SERVED = [
    *("afmoe", "apertus", "arcee", "axk1", "aya_vision", "bitnet", "cohere", "cohere2", "cohere2_moe"),
    *("cohere2_vision", "ctrl", "cwm", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4"),
    *("exaone4_5", "exaone_moe", "flex_olmo", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4"),
    *("gemma4_text", "gemma4_unified", "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm4v"),
    *("glm4v_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "granite", "granite_swa", "granitemoe"),
    *("granitemoe_swa", "granitemoehybrid", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe"),
    *("hy_v3", "hyperclovax", "idefics3", "internvl", "jais2", "jetmoe", "kimi_k25", "laguna", "llama", "llama4"),
    *("llama4_text", "llava", "llava_next", "llava_onevision", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2"),
    *("ministral", "ministral3", "mistral", "mistral3", "mistral4", "mixtral", "modernbert-decoder", "nanochat"),
    *("olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phi4_multimodal", "phimoe", "qwen2"),
    *("qwen2_5_vl", "qwen2_moe", "qwen2_vl", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe", "seed_oss", "smollm3"),
    *("smolvlm", "solar_open", "starcoder2", "vaultgemma", "youtu"),
    *("glm46v", "glm_ocr", "got_ocr2", "hunyuan_vl", "idefics2", "lighton_ocr", "llava_next_video", "ovis2"),
    *("ernie4_5_vl_moe", "paddleocr_vl"),
]

_DELTA: dict[str, object] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
_MAMBA2: dict[str, object] = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 6,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
RECURRENT: dict[str, dict[str, object]] = {
    "bamba": _MAMBA2 | {"attn_layer_indices": [1]},
    "falcon_h1": _MAMBA2 | {"mamba_d_ssm": 64, "ssm_multipliers": [0.9, 0.8, 1.2, 1.1, 0.7]},
    "granitemoehybrid": _MAMBA2 | {"layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 48},
    "jamba": {
        "num_hidden_layers": 3,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_offset": 5,
        "expert_layer_period": 6,
        "mamba_d_state": 6,
        "mamba_dt_rank": 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm2_vl": {"text_config": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}},
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "attention", "mlp", "moe"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 6,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "olmo_hybrid": _DELTA,
    "qwen3_5": {"text_config": {"model_type": "qwen3_5_text"}},
    "qwen3_5_moe": {"text_config": {"model_type": "qwen3_5_moe_text"}},
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
}
"""Settings of the served families some of whose layers keep a recurrent state."""
SERVED = sorted({*SERVED, *RECURRENT})

ATTENTION_ONLY = frozenset(
    {
        *("afmoe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "gemma4"),
        *("glm4_moe", "glm4_moe_lite", "glm4v_moe"),
        *("hunyuan_v1_moe", "kimi_k25", "llama4", "llama4_text", "mimo_v2_flash", "qwen3_next", "solar_open"),
    }
)
"""PEFT saves targets of their feed-forward modules as parameters of experts (`tests/model/test_experts.py`)."""

_LATENT: dict[str, object] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_HALF_MROPE = _MROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
_VISION: dict[str, object] = {
    "hidden_size": 16,
    "embed_dim": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_heads": 2,
    "num_attention_heads": 2,
    "head_dim": 8,
    "out_hidden_size": 32,
    "image_size": 28,
    "patch_size": 14,
}
_GEMMA4: dict[str, object] = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 2,
    "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
    "use_double_wide_mlp": False,
    "enable_moe_block": True,
    "top_k_experts": 2,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
}
"""As 26B-A4B: the keys of layers without a window are their values, too."""
_SHARED_KV: dict[str, object] = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 3, "full_attention"],
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}
"""The last layers read the keys and values of the last layers of their kind before."""
_GEMMA3N: dict[str, object] = _SHARED_KV | {
    "intermediate_size": 48,
    "activation_sparsity_pattern": [0.9, *[0.0] * 5],
    "laurel_rank": 4,
}
_LLAMA4: dict[str, object] = {
    "intermediate_size_mlp": 48,
    "no_rope_layers": [1, 0],
    "floor_scale": 4,
    "attn_temperature_tuning": True,
}
_SETTINGS: dict[str, dict[str, object]] = {
    "axk1": _LATENT,
    "aya_vision": {"text_config": {"model_type": "cohere2"}},
    "cohere2_vision": {"text_config": {"model_type": "cohere2"}},
    "ernie4_5_vl_moe": {
        "text_config": {
            "model_type": "ernie4_5_vl_moe_text",
            "rope_parameters": _MROPE,
            "moe_intermediate_size": [16, 16],
            "moe_num_experts": 4,
            "moe_k": 2,
        }
    },
    "exaone4_5": {"text_config": {"model_type": "exaone4"}},
    "gemma4_unified": {"text_config": {"model_type": "gemma4_unified_text", "global_head_dim": 16}},
    "gemma4_unified_text": {"global_head_dim": 16},
    "glm46v": {"text_config": {"model_type": "glm4v_text", "rope_parameters": _HALF_MROPE}},
    "glm_ocr": {"text_config": {"model_type": "glm_ocr_text", "rope_parameters": _MROPE}},
    "got_ocr2": {"text_config": {"model_type": "qwen2"}},
    "hunyuan_vl": {"text_config": {"model_type": "hunyuan_vl_text", "rope_parameters": _MROPE}},
    "idefics2": {"text_config": {"model_type": "mistral"}},
    "lighton_ocr": {"text_config": {"model_type": "qwen3"}},
    "llava_next_video": {"text_config": {"model_type": "llama"}},
    "ovis2": {"text_config": {"model_type": "qwen2"}},
    "paddleocr_vl": {"text_config": {"model_type": "paddleocr_vl_text", "rope_parameters": _MROPE}},
    "glm4v": {"text_config": {"model_type": "glm4v_text", "rope_parameters": _HALF_MROPE}},
    "glm4v_moe": {"text_config": {"model_type": "glm4v_moe_text", "rope_parameters": _HALF_MROPE}},
    "idefics3": {"text_config": {"model_type": "llama"}},
    "internvl": {"text_config": {"model_type": "qwen2"}},
    "llava_next": {"text_config": {"model_type": "llama"}},
    "minicpm3": _LATENT,
    "mistral4": _LATENT,
    "qwen2_vl": {"text_config": {"model_type": "qwen2_vl_text", "rope_parameters": _MROPE}},
    "smolvlm": {"text_config": {"model_type": "llama"}},
    "youtu": _LATENT,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT | {"v_head_dim": 16},
    "llama4": {"text_config": _LLAMA4 | {"model_type": "llama4_text"}},
    "llama4_text": _LLAMA4,
    "gemma3": {"text_config": {"model_type": "gemma3_text"}},
    "gemma4": {"text_config": _GEMMA4},
    "gemma3n_text": _GEMMA3N,
    "gemma4_text": _SHARED_KV | {"global_head_dim": 16, "use_double_wide_mlp": True},
    "kimi_k25": {"text_config": {"model_type": "deepseek_v3"}},
    "llava": {"text_config": {"model_type": "llama"}},
    "llava_onevision": {"text_config": {"model_type": "qwen2"}},
    "mistral3": {"text_config": {"model_type": "ministral3"}},
    "phi4_multimodal": {
        "vision_config": _VISION | {"image_size": 56},
        "audio_config": {
            "num_blocks": 1,
            "num_attention_heads": 2,
            "bias_max_distance": 8,
            **dict.fromkeys(("hidden_size", "intermediate_size", "nemo_conv_channels", "ext_pw_out_channel"), 16),
            "depthwise_separable_out_channel": 16,
        },
    },
    "phimoe": {"sliding_window": None},  # in its mask only, not passed to attention
    "qwen2_5_vl": {"text_config": {"model_type": "qwen2_5_vl_text", "rope_parameters": _MROPE}},
    "qwen3_vl": {"text_config": {"model_type": "qwen3_vl_text"}},
    "qwen3_vl_moe": {"text_config": {"model_type": "qwen3_vl_moe_text"}},
    "mimo_v2_flash": {"v_head_dim": 6, "swa_v_head_dim": 4},
    **RECURRENT,
}
"""Settings of one family, besides `_SHAPE`."""

PUBLISHED: dict[str, tuple[str, dict[str, object]]] = {
    "granite-4-micro": (
        "granitemoehybrid",
        {"num_hidden_layers": 2, "layer_types": ["attention"] * 2, "num_local_experts": 0},
    ),
    "gemma-4-31b": (
        "gemma4_text",
        {key: value for key, value in _GEMMA4.items() if key not in ("model_type", "top_k_experts")}
        | {"enable_moe_block": False, "hidden_size_per_layer_input": 0},
    ),
}
"""Models with other layers than the one of their family that the rest of the tests take: the family, and settings."""

_EXPERTS = ("expert weights cannot be adapted",)


def _kind_of_mixer(family: str) -> str:
    if family.startswith(("qwen3", "olmo")):
        return "gated delta nets"
    return "short convolutions" if family.startswith("lfm2") else "Mamba" if family == "jamba" else "Mamba-2"


def _without(name: str) -> tuple[str]:
    """For a linear module of the layers that is no site: it runs twice, or its weight is used without it."""
    return (f"`{name}` cannot be adapted",)


LIMITS: dict[str, tuple[str, ...]] = {
    "jetmoe": _EXPERTS,
    "llama4": _EXPERTS,
    "llama4_text": _EXPERTS,
    **{family: (f"recurrent layers ({_kind_of_mixer(family)})",) for family in RECURRENT},
    "gemma3n_text": _without("modality_router"),
    "jamba": ("recurrent layers (Mamba)", *_without("dt_proj")),
    "phi3": ("its longrope models are served up to the original context; `/health` says so",),
}
"""For docs/guide/families.md."""

_BACKENDS = "does not support attention backends"
REFUSED: dict[str, tuple[str, dict[str, object]]] = {
    "biogpt": (_BACKENDS, {}),
    "bloom": (_BACKENDS, {}),
    "codegen": (_BACKENDS, {}),
    "falcon": (_BACKENDS, {}),
    "gpt_neo": (_BACKENDS, {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}),
    "gptj": (_BACKENDS, {}),
    "mamba": ("context", {}),
    "mpt": (_BACKENDS, {}),
    "rwkv": (_BACKENDS, {}),
    "stablelm": (_BACKENDS, {}),
    "xglm": (_BACKENDS, {}),
    "diffllama": ("once in each of 2 layers", {}),
    "doge": ("replaced attention", {}),
    "minimax": ("once in each of 2 layers", {}),
    "minimax_m3_vl_text": ("sparse attention", {"layer_types": ["full_attention", "minimax_m3_sparse"]}),
    "nemotron": ("once in each of 2 layers", {}),
    "recurrent_gemma": ("context", {}),
}
"""A part of the reason, and settings of the config."""
SERVED_SINCE_5_24 = {"codegen", "gptj"}
"""Of those refused with transformers 5.17."""


_SPARSE = "sparse attention"
REFUSED_BY_CONFIG = {
    "axk2": _SPARSE,
    "deepseek_v32": _SPARSE,
    "deepseek_v4": _SPARSE,
    "glm5_next": _SPARSE,
    "glm_moe_dsa": _SPARSE,
    "hy_v4": _SPARSE,
    "inkling_mm_model": "Inkling's attention",
    "kimi_linear": "Kimi's linear attention",
    "qwen4_exp": _SPARSE,
}
"""Refused before a model is made: a part of the reason."""


def _settings(family: str, shape: dict[str, object]) -> dict[str, object]:
    """Those of `shape` that a family's config knows, its own, and those of the configs inside it."""
    kind, own = CONFIG_MAPPING[family], _SETTINGS.get(family, {})
    known = {one.name for one in dataclasses.fields(kind)} | set(kind.attribute_map)
    found = {key: value for key, value in shape.items() if key in known} | own
    text = own.get("text_config")
    if text is None and "text_config" in kind.sub_configs:
        raise ValueError(f"{family} has no settings for its text")
    if isinstance(text, dict):
        found["text_config"] = text | _settings(text["model_type"], _SHAPE) | text
        vision = kind().vision_config
        if vision is not None:
            sizes = {key: value for key, value in _VISION.items() if hasattr(vision, key)}
            found["vision_config"] = {"model_type": vision.model_type} | sizes
    return found


def tiny_family(family: str, *, seed: int = 0, **overrides: object) -> PreTrainedModel:
    """A random fp32 causal LM in eval mode with eager attention; its biases and norms are random too."""
    settings = _settings(family, _SHAPE) | overrides
    config = CONFIG_MAPPING[family](**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).from_config(config, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def tiny_gemma3n(words: int) -> PreTrainedModel:
    """The model around `gemma3n_text` that takes images and sound, whose tokens follow the `words`. Its vision tower
    needs timm; another stands for it."""

    class Towers:
        @staticmethod
        def from_config(config: PretrainedConfig) -> PreTrainedModel:
            if config.model_type != "gemma3n_vision":
                return AutoModel.from_config(config)
            small = {key: value for key, value in _VISION.items() if key in SiglipVisionConfig().to_dict()}
            return SiglipVisionModel(SiglipVisionConfig(**small))

    own, sound = {"hidden_size": 16, "vocab_size": 8}, {"conf_num_hidden_layers": 1, "conf_num_attention_heads": 2}
    config = Gemma3nConfig(
        text_config=_settings("gemma3n_text", _SHAPE),
        vision_config=own | {"vocab_offset": words},
        audio_config=own | sound | {"vocab_offset": words + 8},
    )
    with patch.object(modeling_gemma3n, "AutoModel", Towers), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model_class(config).from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
