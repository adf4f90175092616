"""LoRA servers that run: their processes, sockets and transports, from one start to the loss of one of them."""

from __future__ import annotations

import itertools
import logging
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from coserve.core.errors import LoraServerLost
from coserve.core.link.channel import Channel
from coserve.core.link.link import PeerLost
from coserve.core.processes import spawn_child
from coserve.core.types import SiteSpec
from coserve.engine.lora_server.connect import connect_all
from coserve.engine.lora_server.messages import (
    AnyFromServer,
    AnyToServer,
    BeginStep,
    Exchange,
    PairsLoaded,
    PairsRefused,
    ServerConnected,
    ServerReady,
    StartServer,
)
from coserve.engine.lora_server.placement import part_of
from coserve.engine.lora_server.transport import TensorSpec, Transport
from coserve.kernels.lora.experts.interface import Pending
from coserve.kernels.lora.segments import Segments

log = logging.getLogger(__name__)

EngineChannel = Channel[AnyToServer, AnyFromServer]
Answered = Callable[[int, PairsLoaded | PairsRefused], None]


class Ends(Protocol):
    """The part of `subprocess.Popen` that ends a process."""

    def kill(self) -> None: ...
    def wait(self) -> int: ...


@dataclass
class Server:
    """One server's process and its socket."""

    process: Ends
    channel: EngineChannel
    sites: Mapping[str, SiteSpec]
    version: int = 0
    """Latest version of its adapter table that it has reported."""


class RunningServers:
    """All servers of one start. A loss of one is the loss of all: each has a part of every adapter."""

    def __init__(
        self, start: int, servers: Sequence[Server], transports: Sequence[Transport], answered: Answered
    ) -> None:
        """`start`: number of the start; `transports`: to each server. `answered` is called with a server's index and
        its answer, on other threads."""
        self.servers, self._transports, self.start, self._answered = servers, transports, start, answered
        self._lost = threading.Event()
        self.why = ""
        """Why it was lost."""
        self._steps, self._numbers = itertools.count(1), itertools.count(1)
        self._listeners = [
            threading.Thread(target=self._listen, args=(index, server), name="lora-server", daemon=True)
            for index, server in enumerate(servers)
        ]
        for listener in self._listeners:
            listener.start()

    @property
    def lost(self) -> bool:
        return self._lost.is_set()

    def wait(self) -> None:
        """Wait until a server is lost."""
        self._lost.wait()

    def lose(self, why: str) -> None:
        """Give the servers up; on any thread."""
        if not self.lost:
            self.why = why
            self._lost.set()

    def send(self, index: int, message: AnyToServer) -> None:
        """Send a message; on any thread. A server that does not take it is lost."""
        try:
            self.servers[index].channel.send(message)
        except PeerLost:
            self.lose(f"LoRA server {index} ended")

    def end(self) -> None:
        """Kill the processes, and wait for their ends."""
        _kill(self.servers)
        for listener in self._listeners:
            listener.join()

    def step(self, segments: Segments, slots: Sequence[int], device: torch.device) -> RemoteStep | None:
        """See `RemoteExperts`."""
        bounds, own, tokens = [0], list[int](), list[int]()
        for adapter, start, end in zip(segments.adapters, segments.bounds, segments.bounds[1:], strict=False):
            if adapter >= 0 and slots[adapter] >= 0 and end > start:
                own.append(slots[adapter])
                tokens.extend(range(start, end))
                bounds.append(len(tokens))
        if not tokens:
            return None
        step = next(self._steps)
        for index, server in enumerate(self.servers):
            begin = BeginStep(
                start=self.start, step=step, version=server.version, bounds=tuple(bounds), slots=tuple(own)
            )
            self.send(index, begin)
        return RemoteStep(self, step, torch.tensor(tokens, device=device))

    def exchange(
        self, step: int, site: str, tensors: tuple[Tensor, Tensor], found: TensorSpec, *, down: bool
    ) -> Pending:
        """Send inputs of a parameter, and return a function that waits for its terms."""
        index = next(i for i, server in enumerate(self.servers) if site in server.sites)
        transport, number = self._transports[index], next(self._numbers)
        self.send(index, Exchange(step=step, number=number, site=site, chosen=tensors[1].shape[1], down=down))
        self._check()

        def wait() -> Tensor:
            try:
                return transport.receive(number, [found])[0]
            except ConnectionError as error:
                self.lose(f"LoRA server {index} ended, or did not answer in time")
                raise LoraServerLost(self.why) from error

        try:
            transport.send(number, tensors)
        except ConnectionError as error:
            self.lose(f"LoRA server {index} ended")
            raise LoraServerLost(self.why) from error
        return wait

    def _check(self) -> None:
        if self.lost:
            raise LoraServerLost(self.why)

    def _listen(self, index: int, server: Server) -> None:
        """Take a server's answers until it is gone; on a thread."""
        with suppress(PeerLost), closing(server.channel):
            while True:
                message = server.channel.receive()
                if isinstance(message, PairsLoaded):
                    server.version = max(server.version, message.version)
                if isinstance(message, PairsLoaded | PairsRefused):
                    self._answered(index, message)
        self.lose(f"LoRA server {index} ended")


class RemoteStep:
    """Implements `RemoteTerms`."""

    def __init__(self, running: RunningServers, step: int, tokens_N: Tensor) -> None:
        self._running, self._step, self.tokens_N = running, step, tokens_N
        self._sites = {name: site for server in running.servers for name, site in server.sites.items()}

    def gate_up(self, site: str, x_ND: Tensor, chosen_NK: Tensor) -> Pending:
        found = TensorSpec((*chosen_NK.shape, self._sites[site].out_features), x_ND.dtype)
        return self._running.exchange(self._step, site, (x_ND, chosen_NK.long()), found, down=False)

    def down(self, site: str, h_NKI: Tensor, weights_NK: Tensor) -> Pending:
        found = TensorSpec((len(h_NKI), self._sites[site].out_features), h_NKI.dtype)
        return self._running.exchange(self._step, site, (h_NKI, weights_NK.float()), found, down=True)


def start_servers(settings: Sequence[StartServer], answered: Answered) -> RunningServers:
    """Start servers and connect to them; blocks. The calling thread must live as long as they do. Raises `RuntimeError`
    or `PeerLost` if one does not come up."""
    servers = list[Server]()
    try:
        with tempfile.TemporaryDirectory() as folder:
            rendezvous = f"{folder}/servers"
            for own in settings:
                servers.append(_spawn(msgspec.structs.replace(own, rendezvous=rendezvous)))
            _expect(servers, ServerReady)
            device, deadline = torch.device(settings[0].spec.device), settings[0].deadline
            transports = connect_all(rendezvous, len(servers), device, deadline)
            # A slow server still reads the rendezvous file when the engine has connected to all.
            _expect(servers, ServerConnected)
        return RunningServers(settings[0].start, servers, transports, answered)
    except BaseException:
        _kill(servers)
        for server in servers:
            server.channel.close()
        raise


def _expect(servers: Sequence[Server], kind: type[ServerReady | ServerConnected]) -> None:
    for server in servers:
        message = server.channel.receive()
        assert isinstance(message, kind), f"expected {kind.__name__}, got {message}"


def _kill(servers: Sequence[Server]) -> None:
    for server in servers:
        server.process.kill()
        server.process.wait()


def _spawn(settings: StartServer) -> Server:
    ours, theirs = socket.socketpair()
    with theirs:
        process = spawn_child("coserve.engine.lora_server.process", theirs)
    channel = EngineChannel(ours, msgspec.msgpack.Decoder(AnyFromServer))
    channel.send(settings)
    return Server(process, channel, part_of(settings.spec, settings.index, settings.servers).sites)
