"""Models that benchmarks make with random weights, and the Llama among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel


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


def random_model(config: PretrainedConfig, device: str | torch.device, seed: int) -> PreTrainedModel:
    """Made on the device, in bfloat16 on a GPU and in float32 elsewhere."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device(device) as own:
        dtype = torch.bfloat16 if own.type == "cuda" else torch.float32
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model
