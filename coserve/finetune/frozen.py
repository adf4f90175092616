"""Adapters that a loss reads and that do not learn: a teacher, a reference.

On a sharded base a row of a weight may be spread over several ranks, so the scales of a DoRA adapter need a collective.
Jobs are loaded on a thread, without any; each micro-batch completes the scales, from what the ranks have computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from coserve.finetune.lora_tensors import cast, cast_learning
from coserve.model.base import Base
from coserve.model.lora import LoraWeights


class Frozen(NamedTuple):
    """An adapter: this rank's shard, on the base's device and in its dtype."""

    weights: LoraWeights
    complete: Callable[[], None] = lambda: None
    """To be called before each forward, on all ranks at the same time."""


def frozen_teacher(served: LoraWeights, base: Base) -> Frozen:
    """Return an adapter as `Base.served` gives it."""
    weights = cast(served, base.dtype, base.device)
    if base.sharding is None or not weights.settings.use_dora:
        return Frozen(weights)
    scales = [pair.scale_O for pair in weights.sites.values() if pair.scale_O is not None]
    parts = [scale_O.clone() for scale_O in scales]

    def complete() -> None:
        torch._foreach_copy_(scales, parts)
        base.complete_scales(weights)

    return Frozen(weights, complete)


def frozen_reference(start: LoraWeights, base: Base) -> Frozen:
    """Return an adapter that computes what one in training computes from equal weights. `start`: this rank's shard of
    an adapter that learns."""
    if base.sharding is None or not start.settings.use_dora:
        return Frozen(cast_learning(base.served(start) if base.sharding is None else start, base.dtype, base.device))
    own = cast(start, base.dtype, base.device)
    squares, magnitudes = base.row_squares(own.sites), {name: pair.magnitude_O for name, pair in own.sites.items()}
    sites = {name: replace(pair, magnitude_O=None, scale_O=pair.magnitude_O) for name, pair in own.sites.items()}
    weights = cast_learning(LoraWeights(start.settings, sites), base.dtype, base.device)

    @torch.no_grad()
    def complete() -> None:
        norms = base.norms_of({name: squares_O.clone() for name, squares_O in squares.items()})
        for name, norm_O in norms.items():
            scale_O, magnitude_O = weights.sites[name].scale_O, magnitudes[name]
            assert scale_O is not None and magnitude_O is not None, "expected a magnitude at each site"
            torch.div(magnitude_O, norm_O, out=scale_O)

    return Frozen(weights, complete)
