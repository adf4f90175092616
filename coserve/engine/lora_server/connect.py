"""The connections of an engine and its LoRA servers."""

from __future__ import annotations

import torch

from coserve.core.ranks import JOIN_SECONDS
from coserve.engine.lora_server.messages import StartServer
from coserve.engine.lora_server.transport import GlooTransport, Transport, gloo_group

SLOTS = 1024
"""Most adapters that the servers hold at once."""
ENGINE = 0
"""The engine's rank in the group; server i is rank i + 1."""


def connect(settings: StartServer) -> Transport:
    """Connect a server to its engine, which may still wait for other servers."""
    group = gloo_group(settings.rendezvous, settings.index + 1, settings.servers + 1, JOIN_SECONDS)
    return GlooTransport(group, ENGINE, torch.device(settings.device), settings.deadline)


def connect_all(rendezvous: str, servers: int, device: torch.device, deadline: float) -> list[Transport]:
    """Connect an engine to its servers, each of which calls `connect`; return the transports in the servers' order.
    Raises `RuntimeError` if a server does not connect within `deadline` seconds. This is also the timeout of each
    message."""
    group = gloo_group(rendezvous, ENGINE, servers + 1, deadline)
    return [GlooTransport(group, index + 1, device, deadline) for index in range(servers)]
