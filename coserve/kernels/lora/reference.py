"""The LoRA formula in fp32, as a reference for tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coserve.kernels.lora.interface import Adapters, LoraBackend, SitewiseLora
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair, SiteGroup


class ReferenceBackend(LoraBackend):
    """An fp32 loop over segments: slow and obvious."""

    name = "reference"

    def prepare(self, segments: Segments, adapters: Adapters, groups: Sequence[SiteGroup]) -> ReferenceLora:
        return ReferenceLora(segments, adapters)


class ReferenceLora(SitewiseLora):
    """Reference terms, which never write in place, with or without gradients."""

    def add_site(self, site: str, y_TO: Tensor, x_TD: Tensor) -> Tensor:
        return lora_add(y_TO, x_TD, self.segments, self.pairs(site))


def lora_add(y_TO: Tensor, x_TD: Tensor, segments: Segments, pairs: Sequence[LoraPair | None]) -> Tensor:
    """`y + scaling_a (x a_RDᵀ) b_ORᵀ`, segment by segment in fp32, in y's dtype. Differentiable; writes nothing.

    `pairs[i]` is adapter i's pair at this site, None where it does not target it.
    """
    rows: list[Tensor] = []
    for adapter, start, end in zip(segments.adapters, segments.bounds, segments.bounds[1:], strict=False):
        row = y_TO[start:end].float()
        pair = pairs[adapter] if adapter >= 0 else None
        if pair is not None:
            whole = pair.dense()
            shrunk = x_TD[start:end].float() @ whole.a_RD.float().T
            row = row + pair.scaling * (shrunk @ whole.b_OR.float().T)
        rows.append(row)
    return torch.cat(rows).to(y_TO.dtype) if rows else y_TO.clone()
