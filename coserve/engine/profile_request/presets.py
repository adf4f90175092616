"""Profiles that papers published."""

from __future__ import annotations

from enum import StrEnum

from coserve.engine.profile_request.request import Backend, ProfileRequest, make_workloads

GPT2_XL: dict[str, object] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 1600,
    "n_layer": 48,
    "n_head": 25,
    "n_positions": 1024,
    "vocab_size": 50257,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}
"""The shape of GPT-2 XL (1.56 billion parameters)."""
FIGURE_4_1_BATCHES = (3, 10, 20, 30, 40, 50, 60, 70, 80, 100, 200, 500, 1000)


class Preset(StrEnum):
    FIGURE_4_1 = "figure-4.1"


def preset_request(preset: Preset) -> ProfileRequest:
    """Return the request of `figure-4.1` of the ETS paper (section 4.2.3): GPT-2 XL, rows of 11 tokens, batches of 3 to
    1000, LoRA of rank 32 on `c_attn` and `c_proj`, run by transformers and PEFT. The paper does not name the dtype: its
    versions load float32."""
    assert preset is Preset.FIGURE_4_1
    return ProfileRequest(
        model="gpt2-xl",
        config=GPT2_XL,
        workloads=make_workloads((32,), (("c_attn", "c_proj"),)),
        batches=FIGURE_4_1_BATCHES,
        lengths=(11,),
        backends=(Backend.PEFT,),
        dtype="float32",
    )
