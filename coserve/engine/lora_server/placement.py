"""Which part of every adapter a LoRA server holds; the engine and its servers compute it alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import msgspec

from coserve.core.types import BaseSpec, SiteSpec


@dataclass(frozen=True)
class ServerPart:
    """One server's part: some layers, and of these the experts `first` to `first + experts` - 1."""

    sites: Mapping[str, SiteSpec]
    """Its parameters of experts, with the number of experts that it holds."""
    first: int
    experts: int

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each parameter's messages in a step: they are exchanged in the order of `sites`."""
        return {site: number for number, site in enumerate(self.sites, 1)}


def part_of(spec: BaseSpec, index: int, servers: int, ep: int) -> ServerPart:
    """Return the part of server `index` of `servers`, which `ep` divides.

    Groups of `ep` servers take the layers with experts in turns (InfiniLoRA, section 4.1), so that an adapter's first
    layers are read by several groups at once. Within its group a server has an even share of the experts.
    """
    layers = sorted({site.layer for site in spec.experts.values()})
    own = set(layers[index // ep :: servers // ep])
    experts = max(site.experts for site in spec.experts.values())
    first, end = (experts * place // ep for place in (index % ep, index % ep + 1))
    sites = {
        name: msgspec.structs.replace(site, experts=end - first)
        for name, site in spec.experts.items()
        if site.layer in own
    }
    return ServerPart(sites, first, end - first)
