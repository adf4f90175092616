"""New adapters: PEFT's initialisations, a function of the seed and the site alone."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from coserve.adapters.targets import rank_and_scaling, resolve_targets
from coserve.kernels.lora.types import LoraPair
from coserve.model.lora import LoraWeights
from coserve.types import BaseSpec, LoraSettings, SiteSpec

__all__ = ["new_adapter", "resolve_targets"]


def new_adapter(
    settings: LoraSettings, base: BaseSpec, *, seed: int, dtype: torch.dtype, device: torch.device | str
) -> LoraWeights:
    """An adapter as PEFT would start it; `default` and `gaussian` change nothing yet (B is zero).

    The numbers are drawn in float32 on the CPU: one seed gives one adapter on any machine, whatever other sites there
    are. Raises `InvalidRequest` as `resolve_targets`.
    """
    sites = {}
    for site in resolve_targets(settings, base):
        rank, scaling = rank_and_scaling(settings, site)
        digest = hashlib.blake2b(f"{seed}/{site}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        a_RD, b_OR = _start(settings.init, rank, base.sites[site], generator)
        sites[site] = LoraPair(a_RD.to(device, dtype), b_OR.to(device, dtype), scaling)
    return LoraWeights(settings, sites)


def _start(init: str, rank: int, site: SiteSpec, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    a_RD, b_OR = torch.empty(rank, site.in_features), torch.zeros(site.out_features, rank)
    if init == "gaussian":
        return a_RD.normal_(std=1 / rank, generator=generator), b_OR
    if init == "orthogonal":
        # Rows of one orthogonal matrix, odd ones to A and even ones to B: B A starts at zero, neither factor does.
        q_RR, _ = torch.linalg.qr(torch.randn(rank, rank, generator=generator))
        a_RD = (torch.randn(site.in_features, rank // 2, generator=generator) @ q_RR[0::2]).T / 10
        b_OR = (torch.randn(site.out_features, rank // 2, generator=generator) @ q_RR[1::2]) / 10
        return a_RD.contiguous(), b_OR
    bound = 1 / math.sqrt(site.in_features)  # Kaiming uniform with a = sqrt(5)
    return a_RD.uniform_(-bound, bound, generator=generator), b_OR
