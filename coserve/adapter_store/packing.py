"""An adapter's matrices in one contiguous piece of memory, so that one copy moves all of them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from coserve.memory.buffer import aligned
from coserve.model.lora import LoraWeights


def packed_bytes(weights: LoraWeights) -> int:
    """Bytes of an adapter's matrices back to back, each aligned (`memory.buffer.ALIGNMENT`)."""
    return sum(aligned(pair.a_RD.nbytes) + aligned(pair.b_OR.nbytes) for pair in weights.sites.values())


def views(bytes_N: Tensor, like: LoraWeights) -> LoraWeights:
    """An adapter of the shapes of `like` whose matrices are views of `bytes_N` (uint8), back to back."""
    at = 0

    def view(matrix: Tensor) -> Tensor:
        nonlocal at
        part = bytes_N[at : at + matrix.nbytes].view(matrix.dtype).view(matrix.shape)
        at += aligned(matrix.nbytes)
        return part

    sites = {
        name: replace(pair, a_RD=view(pair.a_RD), b_OR=view(pair.b_OR), main_grads=None)
        for name, pair in like.sites.items()
    }  # a before b, site by site
    return LoraWeights(like.settings, sites)


def packed(weights: LoraWeights, *, pinned: bool) -> LoraWeights:
    """A copy in one piece of host memory; `pinned`: in memory that a GPU copies from asynchronously."""
    bytes_N = torch.empty(packed_bytes(weights), dtype=torch.uint8, pin_memory=pinned)
    copy = views(bytes_N, weights)
    _copy(weights, copy)
    return copy


def copied_into(bytes_N: Tensor, weights: LoraWeights) -> LoraWeights:
    """Copies an adapter into `bytes_N` (uint8, at least `packed_bytes`) and returns its views there.

    The copy of an adapter that `packed` made is asynchronous if it is pinned: torch keeps the source until it ends.
    """
    copy = views(bytes_N, weights)
    source = one_piece(weights)
    if source is None:
        _copy(weights, copy)
    else:
        bytes_N[: source.numel()].copy_(source, non_blocking=True)
    return copy


def one_piece(weights: LoraWeights) -> Tensor | None:
    """uint8 (N): the memory of an adapter that `packed` made; None for any other."""
    matrices = _matrices(weights)
    if not matrices or len({matrix.untyped_storage().data_ptr() for matrix in matrices}) != 1:
        return None
    storage = matrices[0].untyped_storage()
    bytes_N = torch.empty(0, dtype=torch.uint8, device=matrices[0].device).set_(storage)
    if bytes_N.numel() != packed_bytes(weights) or not all(matrix.is_contiguous() for matrix in matrices):
        return None
    expected = [matrix.data_ptr() for matrix in _matrices(views(bytes_N, weights))]
    return bytes_N if expected == [matrix.data_ptr() for matrix in matrices] else None


def _matrices(weights: LoraWeights) -> list[Tensor]:
    return [matrix for pair in weights.sites.values() for matrix in (pair.a_RD, pair.b_OR)]


@torch.no_grad()
def _copy(source: LoraWeights, target: LoraWeights) -> None:
    for ours, theirs in zip(_matrices(target), _matrices(source), strict=True):
        ours.copy_(theirs)
