"""Tiny random models of the families that most tests run: the same weights on every call, nothing downloaded."""

from __future__ import annotations

from transformers import PreTrainedModel

from tests.support import families

VOCAB = families.VOCAB
CONTEXT = 128
WINDOW = 6
"""Sliding window of the families that have one: short enough for a test's sequences to leave it."""

_GEMMA: dict[str, object] = {"sliding_window": WINDOW, "query_pre_attn_scalar": 8}
_SETTINGS: dict[str, dict[str, object]] = {
    "gpt2": {"pad_token_id": None},
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": _GEMMA
    | {
        "layer_types": ["sliding_attention", "full_attention"],
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3": _GEMMA
    | {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "phi": {},
    "phi3": {"sliding_window": None},
}

FAMILIES: tuple[str, ...] = tuple(_SETTINGS)


def tiny_model(family: str, *, seed: int = 0, **overrides: object) -> PreTrainedModel:
    """`tiny_family` of one of `FAMILIES`; "gemma3" is its language model. `overrides` go to its config."""
    name = "gemma3_text" if family == "gemma3" else family
    settings = {"max_position_embeddings": CONTEXT} | _SETTINGS[family] | overrides
    return families.tiny_family(name, seed=seed, **settings)
