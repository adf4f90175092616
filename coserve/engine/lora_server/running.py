"""LoRA servers that run: their processes, sockets and transports, from one start to the loss of one of them."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from coserve.core.errors import LoraServerLost
from coserve.core.link.channel import Channel
from coserve.core.link.link import PeerLost
from coserve.core.processes import spawn_child
from coserve.engine.lora_server.connect import TRIAL, connect_all, try_mailboxes, within
from coserve.engine.lora_server.gpu_driver import IpcUnavailable
from coserve.engine.lora_server.ipc import IpcTransport, Mailboxes
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
        self,
        start: int,
        servers: Sequence[Server],
        transports: Sequence[Transport],
        answered: Answered,
        patience: float,
        note: str = "",
    ) -> None:
        """`start`: number of the start; `transports`: one to each server. `answered` is called with a server's index
        and its answer, on other threads. `patience`: seconds that a GPU may wait for a server; `note`: for the
        operator, on how they are connected."""
        self.servers, self._transports, self.start, self._answered = servers, transports, start, answered
        self.note = note
        self._lost = threading.Event()
        self.why = ""
        """Why the servers were lost; empty before."""
        self._holders: dict[str, list[tuple[int, ServerPart]]] = {}
        for index, server in enumerate(servers):
            for site in server.part.sites:
                self._holders.setdefault(site, []).append((index, server.part))
        self._steps, self._numbers = itertools.count(1), itertools.count(TRIAL + 1)
        self._threads = [
            threading.Thread(target=self._listen, args=(index, server), name="lora-server", daemon=True)
            for index, server in enumerate(servers)
        ]
        self._threads.append(threading.Thread(target=self._watch, args=(patience,), name="lora-watch", daemon=True))
        for thread in self._threads:
            thread.start()

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
        """Kill the processes, and wait for their ends. What waits for them goes on, with garbage: the servers must be
        lost."""
        _kill(self.servers)
        for transport in self._transports:
            transport.release()
        for thread in self._threads:
            thread.join()

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
        self._check()
        try:
            transport.send(message.number, tensors)
        except ConnectionError as error:
            self.lose(f"LoRA server {index} ended")
            raise LoraServerLost(self.why) from error
        self.send(index, message)  # last: a server that knows of a message waits for it

        def wait() -> Tensor:
            try:
                return transport.receive(message.number, [found])[0]
            except ConnectionError as error:
                self.lose(f"LoRA server {index} ended, or did not answer in time")
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

    def _watch(self, patience: float) -> None:
        """Give the servers up if a GPU waits for one too long; on a thread."""
        pause = patience
        while not self._lost.wait(pause):
            pause = patience
            for index, transport in enumerate(self._transports):
                since = transport.waiting
                if since is not None:
                    pause = min(pause, since + patience - time.monotonic())
                    if pause <= 0:
                        self.lose(f"LoRA server {index} did not answer in time")


class RemoteStep:
    """Implements `RemoteTerms`. M = N K choices of experts, S of them of one server's experts."""

    def __init__(self, running: RunningServers, step: int, tokens_N: Tensor) -> None:
        self._running, self._step, self.tokens_N = running, step, tokens_N
        self._own: list[tuple[int, int, Tensor | None]] = []
        """Servers that have chosen experts of the layer, the number of these choices (S), and their indices (S),
        ascending; None: all M."""

    def gate_up(self, site: str, x_ND: Tensor, chosen_NK: Tensor) -> Pending:
        running, waiting, self._own = self._running, list[Pending](), []
        holders, choices = running.holders(site), chosen_NK.numel()
        outputs = holders[0][1].sites[site].out_features
        if len(holders) > 1:
            chosen_NK = chosen_NK.cpu()  # the number of a server's choices goes into its message
        for index, part in holders:
            local_NK, own_S = (chosen_NK.long(), None) if len(holders) == 1 else _share(chosen_NK, part)
            rows = choices if own_S is None else len(own_S)
            if rows:
                message = self._message(site, chosen_NK.shape[1], rows, down=False)
                found = TensorSpec((rows, outputs), x_ND.dtype)
                waiting.append(running.exchange(index, message, (x_ND, local_NK), found))
                self._own.append((index, rows, None if own_S is None else own_S.to(x_ND.device)))

        def wait() -> Tensor:
            if len(waiting) == 1:
                return waiting[0]().view(*chosen_NK.shape, outputs)
            y_MO = x_ND.new_empty(choices, outputs)
            for (_, _, own_S), terms in zip(self._own, waiting, strict=True):
                y_MO[own_S] = terms()
            return y_MO.view(*chosen_NK.shape, outputs)

        return wait

    def down(self, site: str, h_NKI: Tensor, weights_NK: Tensor) -> Pending:
        running, waiting = self._running, list[Pending]()
        h_MI, weights_M = h_NKI.flatten(0, 1), weights_NK.float().view(-1)
        found = TensorSpec((len(h_NKI), running.holders(site)[0][1].sites[site].out_features), h_NKI.dtype)
        for index, rows, own_S in self._own:
            message = self._message(site, weights_NK.shape[1], rows, down=True)
            own = (h_MI, weights_M) if own_S is None else (h_MI[own_S], weights_M[own_S])
            waiting.append(running.exchange(index, message, own, found))

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


def start_servers(
    settings: Sequence[StartServer], answered: Answered, mailboxes: Mailboxes | None = None, note: str = ""
) -> RunningServers:
    """Start servers and connect to them, over `mailboxes` or by gloo; blocks. `note`: see `RunningServers`. The calling
    thread must live as long as they do. Raises `RuntimeError` or `PeerLost` if one does not come up, and
    `IpcUnavailable`."""
    servers, ends = list[Server](), list[IpcTransport]()
    device, deadline = torch.device(settings[0].spec.device), settings[0].deadline
    try:
        with tempfile.TemporaryDirectory() as folder:
            for own in settings:
                own = msgspec.structs.replace(own, rendezvous=f"{folder}/servers")
                if mailboxes is not None:
                    end, mailbox = mailboxes.offer(own.index)
                    ends.append(end)
                    own = msgspec.structs.replace(own, mailbox=mailbox)
                servers.append(_spawn(own))
            _expect(servers, ServerReady)
            transports: Sequence[Transport] = ends
            # A slow server still reads the rendezvous file when the engine has connected to all.
            if mailboxes is None:
                transports = connect_all(f"{folder}/servers", len(servers), device, deadline)
                _expect(servers, ServerConnected)
            else:
                with within(deadline, partial(_kill, servers)):
                    try_mailboxes(ends, device, deadline, partial(_expect, servers, ServerConnected))
        return RunningServers(settings[0].start, servers, transports, answered, deadline, note)
    except BaseException:
        _kill(servers)
        for end in ends:
            end.release()
        for server in servers:
            server.channel.close()
        raise


def _expect(servers: Sequence[Server], kind: type[ServerReady | ServerConnected]) -> None:
    for server in servers:
        message = server.channel.receive()
        assert isinstance(message, kind), f"expected {kind.__name__}, got {message}"
        if isinstance(message, ServerConnected) and message.refused:
            raise IpcUnavailable(message.refused)


def _kill(servers: Sequence[Server]) -> None:
    for server in servers:
        server.process.kill()
        server.process.wait()


def _spawn(settings: StartServer) -> Server:
    ours, theirs = socket.socketpair()
    page = () if settings.mailbox is None else (settings.mailbox.page,)
    with theirs:
        try:
            process = spawn_child("coserve.engine.lora_server.process", theirs, *page)
        except BaseException:
            ours.close()
            raise
        finally:
            for file in page:
                os.close(file)
    channel = EngineChannel(ours, msgspec.msgpack.Decoder(AnyFromServer))
    channel.send(settings)
    return Server(process, channel, part_of(settings.spec, settings.index, settings.servers, settings.ep))
