"""One tiny random config of every family that docs/guide/families.md names: those that are served, and those that are
refused."""

from __future__ import annotations

import dataclasses

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

VOCAB = 128

_SHAPE: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
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
    "afmoe",
    "apertus",
    "arcee",
    "bitnet",
    "cohere",
    "cohere2",
    "ctrl",
    "cwm",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "flex_olmo",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "granitemoe",
    "granitemoeshared",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "jais2",
    "jetmoe",
    "llama",
    "minimax_m2",
    "ministral",
    "mistral",
    "mixtral",
    "modernbert-decoder",
    "nanochat",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "opt",
    "persimmon",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "solar_open",
    "starcoder2",
    "vaultgemma",
]

ATTENTION_ONLY = frozenset({"afmoe", "dots1", "ernie4_5_moe", "glm4_moe", "hunyuan_v1_moe", "solar_open"})
"""PEFT saves targets of their feed-forward modules as parameters of experts, which adapters may not have here."""

_BACKENDS = "does not support attention backends"
_LATENT: dict[str, object] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_SHARED_KV: dict[str, object] = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.0] * 4,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "vocab_size_per_layer_input": 128,
}
REFUSED: dict[str, tuple[str, dict[str, object]]] = {
    "biogpt": (_BACKENDS, {}),
    "bloom": (_BACKENDS, {}),
    "codegen": (_BACKENDS, {}),
    "falcon": (_BACKENDS, {}),
    "gpt_neo": (_BACKENDS, {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}),
    "gptj": (_BACKENDS, {}),
    "mamba": (_BACKENDS, {}),
    "mpt": (_BACKENDS, {}),
    "qwen3_next": (_BACKENDS, {"layer_types": ["linear_attention", "full_attention"]}),
    "rwkv": (_BACKENDS, {}),
    "stablelm": (_BACKENDS, {}),
    "xglm": (_BACKENDS, {}),
    "deepseek_v2": ("multi-head latent attention: .* expected heads of one size", _LATENT),
    "deepseek_v3": ("multi-head latent attention: .* expected heads of one size", _LATENT),
    "diffllama": ("once in each of 2 layers", {}),
    "doge": ("replaced attention", {}),
    "lfm2": ("once in each of 2 layers", {"layer_types": ["conv", "full_attention"]}),
    "gemma3n_text": ("2 of its 4 layers have no keys and values of their own", _SHARED_KV),
    "llama4_text": ("causal", {"attention_chunk_size": 16, "intermediate_size_mlp": 48}),
    "minimax": ("once in each of 2 layers", {}),
    "nemotron": ("once in each of 2 layers", {}),
    "recurrent_gemma": ("context", {}),
}
"""A part of the reason, and settings of the config."""


def tiny_family(family: str, *, seed: int = 0, **overrides: object) -> PreTrainedModel:
    """A random fp32 causal LM in eval mode with eager attention; its biases and norms are random too."""
    kind = CONFIG_MAPPING[family]
    known = {one.name for one in dataclasses.fields(kind)} | set(kind.attribute_map)
    settings = {key: value for key, value in _SHAPE.items() if key in known} | overrides
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(kind(**settings), dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()
