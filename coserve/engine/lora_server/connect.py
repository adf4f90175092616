"""The layout and the connections of an engine's LoRA servers, which both sides compute alike."""

from __future__ import annotations

import torch

from coserve.core.ranks import JOIN_SECONDS
from coserve.core.types import BaseSpec, SiteSpec
from coserve.engine.lora_server.messages import StartServer
from coserve.engine.lora_server.transport import GlooTransport, Transport, gloo_group

SLOTS = 1024
"""Adapters that servers hold at once, at most."""
ENGINE = 0
"""The engine's rank in the group; server i is rank i + 1."""


def layers_of(spec: BaseSpec, index: int, servers: int) -> dict[str, SiteSpec]:
    """Return the parameters of experts that server `index` of `servers` has: those of an even share of the layers."""
    layers = sorted({site.layer for site in spec.experts.values()})
    own = layers[len(layers) * index // servers : len(layers) * (index + 1) // servers]
    return {name: site for name, site in spec.experts.items() if site.layer in own}


def connect(settings: StartServer) -> Transport:
    """Connect a server to its engine, which may still wait for other servers."""
    group = gloo_group(settings.rendezvous, settings.index + 1, settings.servers + 1, JOIN_SECONDS)
    return GlooTransport(group, ENGINE, torch.device(settings.device), settings.deadline)


def connect_all(rendezvous: str, servers: int, device: torch.device, deadline: float) -> list[Transport]:
    """Connect an engine to its servers, which are about to `connect`, in order. Raises `RuntimeError` if they do not
    within `deadline` seconds, which is also the time that a message may take."""
    group = gloo_group(rendezvous, ENGINE, servers + 1, deadline)
    return [GlooTransport(group, index + 1, device, deadline) for index in range(servers)]
