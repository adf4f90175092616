"""Tiny random models of the families that the tests run: the same weights on every call, nothing downloaded."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.gpt2 import GPT2Config
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.phi import PhiConfig
from transformers.models.phi3 import Phi3Config
from transformers.models.qwen3 import Qwen3Config

VOCAB = 128
CONTEXT = 128
WINDOW = 6
"""Sliding window of the families that have one: short enough for a test's sequences to leave it."""

_SHAPE: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}

_FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, object]]] = {
    "gpt2": (
        GPT2Config,
        {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": CONTEXT,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "initializer_range": 0.2,
        },
    ),
    "llama": (LlamaConfig, _SHAPE),
    "qwen3": (Qwen3Config, _SHAPE | {"head_dim": 8}),
    "mistral": (MistralConfig, _SHAPE | {"sliding_window": WINDOW}),
    "gemma2": (
        Gemma2Config,
        _SHAPE
        | {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        _SHAPE
        | {
            "num_hidden_layers": 3,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 8,
        },
    ),
    "phi": (PhiConfig, _SHAPE),
    "phi3": (Phi3Config, _SHAPE),
}

FAMILIES: tuple[str, ...] = tuple(_FAMILIES)


def tiny_model(family: str, *, seed: int = 0, **overrides: object) -> PreTrainedModel:
    """A random fp32 causal LM of one of `FAMILIES` in eval mode, with eager attention (sdpa drops Gemma's soft cap).

    `overrides` go to its config.

    Biases and norm weights are random too: a term that the seams drop shows in the logits.
    """
    kind, settings = _FAMILIES[family]
    config = kind(**(settings | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()
