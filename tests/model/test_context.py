"""The context by the type of rotary scaling: what is served is the model's own logits, what is not is said."""

from __future__ import annotations

import pytest
import torch
from transformers import PretrainedConfig
from transformers.models.llama import LlamaConfig
from transformers.models.phi3 import Phi3Config

from coserve.core.errors import UnsupportedBase
from coserve.model.base import wrap_base
from coserve.model.context import context_of
from tests.support.families import tiny_family
from tests.support.host_waits import copies_from_the_host
from tests.support.lora_reference import alone, packed, tokens_of
from tests.support.tiny_models import CONTEXT, tiny_model

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
}


def _llama(context: int, **rotary: object) -> PretrainedConfig:
    return LlamaConfig(max_position_embeddings=context, rope_parameters={"rope_theta": 10000.0} | rotary)


@pytest.mark.parametrize(
    ("config", "tokens", "says"),
    [
        (_llama(4096, rope_type="default"), 4096, ""),
        (_llama(4096, rope_type="linear", factor=4.0), 4096, ""),
        (_llama(4096, rope_type="dynamic", factor=2.0), 4096, "4096 of its 8192 tokens"),
        (_llama(4096, rope_type="yarn", factor=4.0, original_max_position_embeddings=4096), 16384, ""),
        (_llama(16384, rope_type="yarn", factor=4.0, original_max_position_embeddings=4096), 16384, ""),
        (
            _llama(
                8192,
                rope_type="llama3",
                factor=8.0,
                original_max_position_embeddings=1024,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
            ),
            8192,
            "",
        ),
        (
            Phi3Config(
                hidden_size=32,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=256,
                original_max_position_embeddings=64,
                rope_parameters=LONGROPE,
                pad_token_id=0,
            ),
            64,
            "64 of its 256 tokens",
        ),
    ],
    ids=["default", "linear", "dynamic", "yarn", "yarn-full", "llama3", "longrope"],
)
@pytest.mark.filterwarnings("ignore")
def test_the_context_of_each_rotary_scaling(config: PretrainedConfig, tokens: int, says: str) -> None:
    context = context_of(config, least=26)
    assert context.tokens == tokens
    assert says in context.note
    assert bool(says) == bool(context.note)


def test_too_short_a_context_is_refused() -> None:
    with pytest.raises(UnsupportedBase, match="at least 26"):
        context_of(_llama(16, rope_type="default"), least=26)


def test_longrope_is_served_up_to_its_original_context_and_the_base_says_so() -> None:
    model = tiny_model("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=64)
    spec = wrap_base(model, name="tiny").spec
    assert spec.context == 64
    assert "longrope" in spec.context_note


@pytest.mark.parametrize(
    ("family", "rotary"),
    [
        ("llama", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT}),
        (
            "llama",
            {
                "rope_type": "llama3",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        ),
        ("llama", {"rope_type": "dynamic", "factor": 2.0}),
        ("phi3", LONGROPE),
        ("phimoe", LONGROPE | {"short_mscale": 1.2, "long_mscale": 1.4}),
    ],
    ids=lambda one: one["rope_type"] if isinstance(one, dict) else one,
)
@pytest.mark.filterwarnings("ignore")
def test_long_and_short_sequences_in_one_batch_have_the_models_own_logits(
    family: str, rotary: dict[str, object]
) -> None:
    """Up to the last token of the context, which for yarn is beyond `max_position_embeddings`. And a CUDA graph can
    hold a step."""
    settings: dict[str, object] = {"max_position_embeddings": CONTEXT, "rope_parameters": {"rope_theta": 1e4} | rotary}
    settings |= {key: value for key, value in rotary.items() if key.startswith("original") and family != "llama"}
    base = wrap_base(tiny_family(family, **settings), name="tiny")
    factor = {"yarn": 4, "longrope": 0.5}.get(str(rotary["rope_type"]), 1)
    assert base.spec.context == factor * CONTEXT
    sequences = [tokens_of(base.spec.context), tokens_of(5)]
    want = [alone(tiny_family(family, **settings), tokens_T) for tokens_T in sequences]
    for got, expected in zip(packed(base, sequences), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert copies_from_the_host(base) == []
