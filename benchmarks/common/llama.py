"""The Llama that benchmarks make with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaConfig


@dataclass(frozen=True)
class Llama:
    """Sizes of a Llama."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    context: int


def llama_config(sizes: Llama) -> LlamaConfig:
    from transformers import LlamaConfig  # here: not all who know sizes need it

    return LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=sizes.context,
        rope_theta=500000.0,
        bos_token_id=0,
        eos_token_id=1,
    )
