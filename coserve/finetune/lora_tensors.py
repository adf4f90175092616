"""The tensors of an adapter by name, and copies of it in another dtype or on another device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from coserve.model.lora import LoraWeights


def named_tensors(weights: LoraWeights) -> Iterator[tuple[str, Tensor]]:
    """Names `<site>.a` and `<site>.b`, and the tensors as they lie (a block-diagonal one packed), of every site."""
    for site, pair in weights.sites.items():
        yield f"{site}.a", pair.a_RD
        yield f"{site}.b", pair.b_OR


def cast(weights: LoraWeights, dtype: torch.dtype, device: torch.device | None = None) -> LoraWeights:
    """A copy in `dtype` that shares nothing with `weights`. `device`: None: where they are."""
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
    """As `cast`. The copy runs by the operations of an adapter that learns: the same weights then have the same
    likelihoods."""
    found = cast(weights, dtype, device)
    for _, tensor in named_tensors(found):
        tensor.requires_grad_()
    return found
