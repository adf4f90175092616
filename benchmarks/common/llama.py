"""The Llama that benchmarks make with random weights."""

from __future__ import annotations

from typing import Protocol

from transformers import LlamaConfig


class Sizes(Protocol):
    """Of a Llama."""

    @property
    def layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def inner(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def context(self) -> int: ...


def llama_config(sizes: Sizes) -> LlamaConfig:
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
