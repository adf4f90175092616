"""DoRA's scales on a sharded base, where a row of a weight may be spread over several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from coserve.kernels.lora.dora import squared_norms
from coserve.kernels.lora.types import LoraPair
from coserve.model.parallel.sharding import Sharding


def rank_scale(name: str, weight_OD: Tensor, whole: LoraPair, sharding: Sharding | None) -> Tensor:
    """Return this rank's scales at a site: fp32 (O). If rows of the weight are spread over the ranks, return the rank's
    summand of `sign(magnitude) / scale²` instead; `complete_scales` adds these up. `weight_OD`: this rank's shard;
    `whole`: the whole pair."""
    magnitude_O, pair, sums = whole.magnitude_O, whole, False
    assert magnitude_O is not None, "expected a magnitude at each site"
    if sharding is not None:
        own, rank = sharding.sites[name], sharding.mesh.rank
        a_RD, sums = own.inputs.shard(whole.a_RD.T, rank).T, own.sums
        pair = replace(whole, a_RD=a_RD, b_OR=own.outputs.shard(whole.b_OR, rank))
        magnitude_O = own.outputs.shard(magnitude_O, rank)
    squares_O = squared_norms(weight_OD, pair)
    if sums:
        return torch.where(magnitude_O == 0, torch.inf, squares_O / (magnitude_O * magnitude_O.abs()))
    return magnitude_O / squares_O.sqrt()


def add_squares(squares: Mapping[str, Tensor], sharding: Sharding) -> None:
    """Complete squared norms of the ranks' parts of rows, fp32 (O) by site, in place, by one collective. All ranks call
    it at the same time."""
    summed = [squares_O for name, squares_O in squares.items() if sharding.sites[name].sums]
    if summed:
        whole = sharding.mesh.all_reduce(torch.cat(summed))
        torch._foreach_copy_(summed, list(torch.split(whole, [len(squares_O) for squares_O in summed])))


def complete_scales(sites: Mapping[str, LoraPair], sharding: Sharding) -> None:
    """Complete the scales of `rank_scale` in place, by one collective. All ranks call it at the same time."""
    summed = [sites[name].scale_O for name in sites if sharding.sites[name].sums]
    found = [scale_O for scale_O in summed if scale_O is not None]
    if found:
        whole = sharding.mesh.all_reduce(torch.cat(found))
        whole = whole.sign() / whole.abs().sqrt()
        torch._foreach_copy_(found, list(torch.split(whole, [len(scale_O) for scale_O in found])))
