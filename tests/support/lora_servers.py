"""LoRA servers as threads of this process, and the adapters that they serve."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from threading import Thread

import msgspec
import torch

from coserve.core.link.channel import Channel
from coserve.core.link.link import PeerLost
from coserve.core.types import AdapterRef
from coserve.engine.lora_server.messages import AnyFromServer, AnyToServer
from coserve.engine.lora_server.placement import part_of
from coserve.engine.lora_server.reading import PairsReader
from coserve.engine.lora_server.running import Answered, RunningServers, Server
from coserve.engine.lora_server.server import LoraServer, ReadPairs
from coserve.engine.lora_server.terms import HeldPairs
from coserve.engine.lora_server.transport import GlooTransport, gloo_group
from coserve.lora.store.files import load_adapter
from coserve.model.base import Base
from coserve.model.lora import LoraWeights
from coserve.state.folder import DataFolder
from tests.support.families import tiny_family
from tests.support.lora_reference import save_peft

BOTH = ["experts.gate_up_proj", "experts.down_proj"]
KINDS = ((3, BOTH, ["q_proj", "o_proj"]), (5, BOTH[1:], []))
REFS = [AdapterRef("one", 1), AdapterRef("two", 1)]


class Ended:
    """Ends a server's thread in place of its process."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def kill(self) -> None:
        self._end.shutdown(socket.SHUT_RDWR)

    def wait(self) -> int:
        return 0


def in_threads(
    base: Base,
    folder: Path,
    servers: int,
    told: Answered,
    *,
    ep: int = 1,
    readers: Callable[[ReadPairs], ReadPairs] = lambda read: read,
    deadline: float = 60.0,
) -> RunningServers:
    """Servers as threads of this process; gloo connects them as it connects processes. `readers` wraps how they read
    adapters. `deadline`: seconds that a message may take; a thread that ends leaves its group open."""
    found, ranks = list[Server](), ThreadPoolExecutor(servers + 1)
    groups = [ranks.submit(gloo_group, str(folder / "ranks"), rank, servers + 1, 60.0) for rank in range(servers + 1)]
    for index in range(servers):
        ours, theirs = socket.socketpair()
        part = part_of(base.spec, index, servers, ep)
        read = readers(PairsReader(part, base.spec, DataFolder(folder), base.device))
        channel = Channel[AnyFromServer, AnyToServer](theirs, msgspec.msgpack.Decoder(AnyToServer))
        transport = GlooTransport(groups[index + 1].result(), 0, base.device, deadline)
        server = LoraServer(channel, transport, HeldPairs(part.sites, 8, base.device), read, 1)
        Thread(target=run, args=(server, channel), daemon=True).start()
        own = Channel[AnyToServer, AnyFromServer](ours, msgspec.msgpack.Decoder(AnyFromServer))
        found.append(Server(Ended(ours), own, part))
    transports = [GlooTransport(groups[0].result(), index + 1, base.device, deadline) for index in range(servers)]
    ranks.shutdown()
    return RunningServers(1, found, transports, told)


def run(server: LoraServer, channel: Channel[AnyFromServer, AnyToServer]) -> None:
    with suppress(PeerLost), closing(channel):
        server.run(torch.float32)


def save_adapters(family: str, base: Base, folder: Path) -> list[LoraWeights]:
    found = []
    for ref, (rank, parameters, modules) in zip(REFS, KINDS, strict=True):
        path = DataFolder(folder).adapter(ref)
        path.mkdir(parents=True)
        save_peft(tiny_family(family), path, seed=rank, r=rank, target_modules=modules, target_parameters=parameters)
        found.append(load_adapter(path, base.spec, device="cpu", dtype=torch.float32))
    return found
