"""How to undo the changes that llama.cpp makes to the numbers of parameters before it stores them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig

Change = Callable[[Sequence[Tensor], PretrainedConfig], Tensor]
"""Makes a parameter from its stored tensors, sorted by name (so gate before up). The result may lack dimensions of size
1."""


def joined(parts: Sequence[Tensor], _config: PretrainedConfig) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), -2)


def in_turns(parts: Sequence[Tensor], _config: PretrainedConfig) -> Tensor:
    """gpt-oss' experts: transposed to (E, inputs, outputs), with the columns of gate and up interleaved."""
    turned = [part.transpose(1, 2) if part.dim() == 3 else part for part in parts]
    return turned[0].contiguous() if len(turned) == 1 else torch.stack(turned, -1).flatten(-2)


def transposed(parts: Sequence[Tensor], _config: PretrainedConfig) -> Tensor:
    return parts[0].T


def plus_one(parts: Sequence[Tensor], _config: PretrainedConfig) -> Tensor:
    """Norms that multiply by `1 + weight`: files store the sum."""
    return parts[0] - 1


def decay(parts: Sequence[Tensor], _config: PretrainedConfig) -> Tensor:
    return (-parts[0]).log()


def by_key_heads(before: Change = joined, *, dim: int = 0, behind_keys: bool = False) -> Change:
    """Undo llama.cpp's order of a gated delta net's value heads: (value heads per key head, key heads) becomes (key
    heads, value heads per key head). `behind_keys`: queries and keys come first and keep their order."""

    def change(parts: Sequence[Tensor], config: PretrainedConfig) -> Tensor:
        stored = before(parts, config)
        keys, values = int(config.linear_num_key_heads), int(config.linear_num_value_heads)
        first = 2 * keys * int(config.linear_key_head_dim) if behind_keys else 0
        kept, heads = torch.split(stored, [first, stored.shape[dim] - first], dim)
        heads = torch.unflatten(heads, dim, (values // keys, keys, -1)).transpose(dim, dim + 1)
        return torch.cat([kept, heads.flatten(dim, dim + 2)], dim)

    return change


def by_heads(parts: Sequence[Tensor], config: PretrainedConfig) -> Tensor:
    """Qwen3-Next's queries, keys, values and gates, grouped by key head. Older files store one tensor in that order."""
    if len(parts) == 1:
        return parts[0]
    (gates, rest), heads = parts, int(config.linear_num_key_heads)
    keys = heads * int(config.linear_key_head_dim)
    kinds = (*torch.split(rest, [keys, keys, len(gates)]), gates)
    return torch.cat([one.reshape(heads, -1, rest.shape[1]) for one in kinds], 1).flatten(0, 1)


def by_pairs(heads: str) -> Change:
    """Turn interleaved rotary rows, where the two of a pair are neighbours, into two halves. `heads`: name of the
    setting with the number of heads."""

    def change(parts: Sequence[Tensor], config: PretrainedConfig) -> Tensor:
        rows = parts[0].reshape(int(getattr(config, heads)), -1, 2, *parts[0].shape[1:])
        return rows.transpose(1, 2).flatten(0, 2)

    return change
