"""An adapter's tensors by name, and copies of it in another dtype or on another device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from coserve.model.lora import LoraWeights


def named_tensors(weights: LoraWeights) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of every site as stored (block-diagonal ones packed), named `<site>.a` and `<site>.b`."""
    for site, pair in weights.sites.items():
        yield f"{site}.a", pair.a_RD
        yield f"{site}.b", pair.b_OR


def cast(weights: LoraWeights, dtype: torch.dtype, device: torch.device | None = None) -> LoraWeights:
    """Return a copy in `dtype` that shares no memory with `weights`. `device`: None: unchanged."""
    pairs = {
        site: replace(
            pair,
            a_RD=pair.a_RD.detach().to(device, dtype, copy=True),
            b_OR=pair.b_OR.detach().to(device, dtype, copy=True),
            main_grads=None,
        )
        for site, pair in weights.sites.items()
    }
    return LoraWeights(weights.settings, pairs)


def cast_learning(weights: LoraWeights, dtype: torch.dtype, device: torch.device) -> LoraWeights:
    """Like `cast`, but the copy requires gradients. It then runs the same operations as a trained adapter, so equal
    weights give equal likelihoods."""
    found = cast(weights, dtype, device)
    for _, tensor in named_tensors(found):
        tensor.requires_grad_()
    return found
