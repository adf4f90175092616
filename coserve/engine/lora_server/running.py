"""LoRA servers that run: their processes, sockets and transports, from one start to the loss of one of them."""

from __future__ import annotations

import itertools
import logging
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
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
from coserve.engine.lora_server.placement import ServerPart, part_of
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
    part: ServerPart
    version: int = 0
    """Latest version of its adapter table that it has reported."""


class RunningServers:
    """All servers of one start. A loss of one is the loss of all: each has a part of every adapter."""

    def __init__(
        self, start: int, servers: Sequence[Server], transports: Sequence[Transport], answered: Answered
    ) -> None:
        """`start`: number of the start; `transports`: one to each server. `answered` is called with a server's index
        and its answer, on other threads."""
        self.servers, self._transports, self.start, self._answered = servers, transports, start, answered
        self._lost = threading.Event()
        self.why = ""
        """Why the servers were lost; empty before."""
        self._holders: dict[str, list[tuple[int, ServerPart]]] = {}
        for index, server in enumerate(servers):
            for site in server.part.sites:
                self._holders.setdefault(site, []).append((index, server.part))
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

    def exchange(self, index: int, message: Exchange, tensors: tuple[Tensor, Tensor], found: TensorSpec) -> Pending:
        """Send a server inputs of a parameter, and return a function that waits for its terms."""
        transport = self._transports[index]
        self.send(index, message)
        self._check()

        def wait() -> Tensor:
            try:
                return transport.receive(message.number, [found])[0]
            except ConnectionError as error:
                self.lose(f"LoRA server {index} ended, or did not answer in time")
                raise LoraServerLost(self.why) from error

        try:
            transport.send(message.number, tensors)
        except ConnectionError as error:
            self.lose(f"LoRA server {index} ended")
            raise LoraServerLost(self.why) from error
        return wait

    def holders(self, site: str) -> list[tuple[int, ServerPart]]:
        """Return the servers that have experts of a parameter, and their parts."""
        return self._holders[site]

    def next_number(self) -> int:
        """Return the number of the next exchange."""
        return next(self._numbers)

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
    """Implements `RemoteTerms`. M = N K choices of experts, S of them of one server's experts."""

    def __init__(self, running: RunningServers, step: int, tokens_N: Tensor) -> None:
        self._running, self._step, self.tokens_N = running, step, tokens_N
        self._own: list[tuple[int, Tensor]] = []
        """Servers that have chosen experts of the layer, and the indices of these choices (S), ascending."""

    def gate_up(self, site: str, x_ND: Tensor, chosen_NK: Tensor) -> Pending:
        running, waiting, self._own = self._running, list[Pending](), []
        holders, choices = running.holders(site), chosen_NK.numel()
        outputs = holders[0][1].sites[site].out_features
        if len(holders) == 1:
            shares = [(holders[0][0], chosen_NK.long(), torch.arange(choices, device=x_ND.device))]
        else:
            chosen_NK = chosen_NK.cpu()  # the number of a server's choices goes into its message
            shares = [(index, *_share(chosen_NK, part)) for index, part in holders]
        for index, local_NK, own_S in shares:
            if len(own_S):
                message = self._message(site, chosen_NK.shape[1], len(own_S), down=False)
                found = TensorSpec((len(own_S), outputs), x_ND.dtype)
                waiting.append(running.exchange(index, message, (x_ND, local_NK), found))
                self._own.append((index, own_S.to(x_ND.device)))

        def wait() -> Tensor:
            if len(waiting) == 1:
                return waiting[0]().view(*chosen_NK.shape, outputs)
            y_MO = x_ND.new_empty(choices, outputs)
            for (_, own_S), terms in zip(self._own, waiting, strict=True):
                y_MO[own_S] = terms()
            return y_MO.view(*chosen_NK.shape, outputs)

        return wait

    def down(self, site: str, h_NKI: Tensor, weights_NK: Tensor) -> Pending:
        running, waiting = self._running, list[Pending]()
        h_MI, weights_M = h_NKI.flatten(0, 1), weights_NK.float().view(-1)
        found = TensorSpec((len(h_NKI), running.holders(site)[0][1].sites[site].out_features), h_NKI.dtype)
        for index, own_S in self._own:
            message = self._message(site, weights_NK.shape[1], len(own_S), down=True)
            waiting.append(running.exchange(index, message, (h_MI[own_S], weights_M[own_S]), found))

        def wait() -> Tensor:
            y_ND, *others = [terms() for terms in waiting]
            for terms_ND in others:
                y_ND = y_ND + terms_ND
            return y_ND

        return wait

    def _message(self, site: str, chosen: int, rows: int, *, down: bool) -> Exchange:
        number = self._running.next_number()
        return Exchange(step=self._step, number=number, site=site, chosen=chosen, rows=rows, down=down)


def _share(chosen_NK: Tensor, part: ServerPart) -> tuple[Tensor, Tensor]:
    """Return the numbers of chosen experts among a server's, one past the last for others, and the indices of the
    choices that are its own (S)."""
    local_NK = chosen_NK.long() - part.first
    own_NK = (local_NK >= 0) & (local_NK < part.experts)
    return local_NK.where(own_NK, part.experts), own_NK.view(-1).nonzero()[:, 0]


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
        try:
            process = spawn_child("coserve.engine.lora_server.process", theirs)
        except BaseException:
            ours.close()
            raise
    channel = EngineChannel(ours, msgspec.msgpack.Decoder(AnyFromServer))
    channel.send(settings)
    return Server(process, channel, part_of(settings.spec, settings.index, settings.servers, settings.ep))
