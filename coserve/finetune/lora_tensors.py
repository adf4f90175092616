"""An adapter's tensors by name, whether they are finite, and copies of it in another dtype or on another device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from coserve.core.errors import NonFiniteLoss
from coserve.core.names import is_rows
from coserve.model.lora import LoraWeights


def named_tensors(weights: LoraWeights) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of every site as stored (block-diagonal ones packed), named `<site>.a`, `<site>.b`, and for
    DoRA's magnitudes `<site>.m`. Replaced rows of embedding and head have no `<site>.b`."""
    for site, pair in weights.sites.items():
        yield f"{site}.a", pair.a_RD
        if not is_rows(site):
            yield f"{site}.b", pair.b_OR
        if pair.magnitude_O is not None:
            yield f"{site}.m", pair.magnitude_O


def refuse_non_finite(tensors: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Raise `NonFiniteLoss` for a NaN, an infinity, or a number that overflows in `dtype`."""
    if not all(bool(torch.isfinite(tensor.to(dtype)).all()) for tensor in tensors):
        kind = str(dtype).removeprefix("torch.")
        raise NonFiniteLoss(f"the adapter's weights are not finite in {kind}; try a lower learning rate")


def cast(weights: LoraWeights, dtype: torch.dtype, device: torch.device | None = None) -> LoraWeights:
    """Return a copy in `dtype` that shares no memory with `weights`. `device`: None: unchanged."""
    return LoraWeights(
        weights.settings, {site: pair.to(device, dtype, copy=True) for site, pair in weights.sites.items()}
    )


def cast_learning(weights: LoraWeights, dtype: torch.dtype, device: torch.device) -> LoraWeights:
    """Like `cast`, but the copy requires gradients. It then runs the same operations as a trained adapter, so equal
    weights give equal likelihoods."""
    found = cast(weights, dtype, device)
    for pair in found.sites.values():
        for tensor in (pair.a_RD, pair.b_OR, pair.scale_O):
            if tensor is not None:
                tensor.requires_grad_()
    return found
