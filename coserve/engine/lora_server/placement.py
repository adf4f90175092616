"""Which part of every adapter a LoRA server holds; the engine and its servers compute it alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from coserve.core.types import BaseSpec, SiteSpec


@dataclass(frozen=True)
class ServerPart:
    """One server's part: some layers, and of these the experts `first` to `first + experts` - 1."""

    sites: Mapping[str, SiteSpec]
    """Its parameters of experts, with the number of experts that it holds."""
    first: int
    experts: int


def part_of(spec: BaseSpec, index: int, servers: int) -> ServerPart:
    """Return the part of server `index` of `servers`: all experts of an even share of the layers."""
    layers = sorted({site.layer for site in spec.experts.values()})
    own = layers[len(layers) * index // servers : len(layers) * (index + 1) // servers]
    sites = {name: site for name, site in spec.experts.items() if site.layer in own}
    experts = max(site.experts for site in spec.experts.values())
    held = {name: msgspec.structs.replace(site, experts=experts) for name, site in sites.items()}
    return ServerPart(held, 0, experts)
