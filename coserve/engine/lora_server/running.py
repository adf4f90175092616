"""LoRA servers that run: their processes, sockets and transports, from one start to the loss of one of them."""

from __future__ import annotations

import logging
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn, Protocol

import msgspec
import torch

from coserve.core.errors import LoraServerLost
from coserve.core.link.channel import Channel
from coserve.core.link.link import PeerLost
from coserve.core.processes import spawn_child
from coserve.core.ranks import START_SILENCE
from coserve.engine.lora_server.gpu_driver import IpcUnavailable
from coserve.engine.lora_server.ipc import EngineEnd, Mailboxes
from coserve.engine.lora_server.messages import (
    AnyFromServer,
    AnyToServer,
    BeginStep,
    ConnectTransport,
    EnginesConnected,
    PairsLoaded,
    PairsRefused,
    ServerConnected,
    ServerReady,
    StartServer,
)
from coserve.engine.lora_server.placement import ServerPart, part_of
from coserve.engine.lora_server.remote_step import RemoteStep, ServerConnection, step_slots
from coserve.engine.lora_server.transport import EngineTransport, join_servers, within
from coserve.kernels.lora.segments import Segments

log = logging.getLogger(__name__)

EngineChannel = Channel[AnyToServer, AnyFromServer]
Told = PairsLoaded | PairsRefused | EnginesConnected
"""Messages of a server that is connected."""
Answered = Callable[[int, Told], None]
"""Takes such a message of the server with this index; on any thread."""


class ServerProcess(Protocol):
    """The part of `subprocess.Popen` that ends a process."""

    def kill(self) -> None: ...
    def wait(self) -> int: ...


@dataclass
class Server:
    """One server's process and its socket."""

    process: ServerProcess
    channel: EngineChannel
    part: ServerPart
    version: int = 0
    """Latest version of its adapter table that it has reported."""
    engines: int = 1
    """Engines that it has, this one included."""

    @classmethod
    def begin(cls, process: ServerProcess, sock: socket.socket, settings: StartServer) -> Server:
        """Send a process its settings over its socket. Raises `PeerLost`."""
        channel = EngineChannel(sock, msgspec.msgpack.Decoder(AnyFromServer))
        channel.send(settings)
        return cls(process, channel, part_of(settings.spec, settings.index, settings.servers, settings.ep))


class RunningServers:
    """All servers of one start. A loss of one is the loss of all: each has a part of every adapter."""

    def __init__(
        self,
        start: int,
        servers: Sequence[Server],
        transports: Sequence[EngineTransport],
        answered: Answered,
        patience: float,
        note: str = "",
    ) -> None:
        """`start`: number of the start; `transports`: one to each server. `patience`: seconds that a GPU may wait for a
        server; `note`: for the operator, on how they are connected."""
        self.servers, self.start, self._answered, self.note = servers, start, answered, note
        ends = enumerate(zip(servers, transports, strict=True))
        self.connections = [ServerConnection(index, server.part, transport) for index, (server, transport) in ends]
        self._lost = threading.Event()
        self.why = ""
        """Why the servers were lost; empty before."""
        last = max((server.part.sites for server in servers), key=lambda sites: max(s.layer for s in sites.values()))
        self._last, self._open = [*last][-1], False
        """The parameter that a step comes to last, and whether a step has begun that has not come to it."""
        self._threads = [
            threading.Thread(target=self._listen, args=(index, server), name="lora-server", daemon=True)
            for index, server in enumerate(servers)
        ]
        self._threads.append(threading.Thread(target=self._watch, args=(patience,), name="lora-watch", daemon=True))
        for server in servers:  # a sender holds a lock that the loss of a server needs
            server.channel.limit_sends(patience)
        for thread in self._threads:
            thread.start()

    @property
    def lost(self) -> bool:
        """Whether a server is lost. One that has given up a step is, before its connection closes."""
        for connection in self.connections:
            if connection.transport.left:
                self.lose(f"LoRA server {connection.index} has given up a step, in which this engine was silent")
        return self._lost.is_set()

    def wait(self) -> None:
        """Wait until a server is lost."""
        self._lost.wait()

    def lose(self, why: str) -> None:
        """Give the servers up; on any thread."""
        if not self._lost.is_set():
            self.why = why
            self._lost.set()

    def send(self, index: int, message: AnyToServer) -> None:
        """Send a message; on any thread. A server that does not take it is lost."""
        try:
            self.servers[index].channel.send(message)
        except PeerLost:
            self.lose(f"LoRA server {index} ended, or takes no messages")

    def end(self) -> None:
        """End the processes, or this engine's share in them, and wait for it. What waits for them goes on, with
        garbage: the servers must be lost."""
        for connection in self.connections:
            connection.transport.leave()
        _kill(self.servers)
        for connection in self.connections:
            connection.transport.release()
        for thread in self._threads:
            thread.join()

    def step(self, segments: Segments, slots: Sequence[int]) -> RemoteStep | None:
        """See `RemoteExperts`."""
        found = step_slots(segments, slots, segments.tokens)
        if found is None:
            return None
        self.begin(*found)
        return RemoteStep(self.connections, self.fail, self.received)

    def begin(self, bounds: tuple[int, ...], slots: tuple[int, ...]) -> None:
        """Begin a step (`BeginStep`), once the GPU has come to the end of the exchanges before: an error of a step may
        be known earlier. Raises `LoraServerLost`, also after a step that failed between two exchanges: the servers
        still wait for the others."""
        if self._open:
            self.launched()
            self.lose("the LoRA servers wait for the rest of a step that failed")
        self._check()
        for connection in self.connections:
            connection.transport.begin()
        self._check()  # again: waits that were released meanwhile are not any more
        self._open = True
        for index, server in enumerate(self.servers):
            self.send(index, BeginStep(start=self.start, version=server.version, bounds=bounds, slots=slots))

    def launched(self) -> None:
        """Note that no exchange of the step will follow: all are in the stream, or have ended."""
        self._open = False
        for connection in self.connections:
            connection.transport.launched()

    def received(self, site: str) -> None:
        """Note that a parameter's terms have come."""
        if site == self._last:
            self.launched()

    def fail(self, index: int, error: ConnectionError) -> NoReturn:
        """Give the servers up for an error of a connection."""
        self.lose(f"LoRA server {index} ended, or did not answer in time")
        raise LoraServerLost(self.why) from error

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
                if isinstance(message, EnginesConnected):
                    server.engines = message.engines
                if isinstance(message, Told):
                    self._answered(index, message)
        self.lose(f"LoRA server {index} ended")

    def _watch(self, patience: float) -> None:
        """Give the servers up if a GPU waits for the same answer for `patience` seconds; on a thread."""
        before: list[tuple[int, int] | None] = [None] * len(self.connections)
        while not self._lost.wait(patience):
            now = [connection.transport.waiting for connection in self.connections]
            for index, waiting in enumerate(now):
                if waiting is not None and waiting == before[index]:
                    self.lose(f"LoRA server {index} did not answer in time")
            before = now


def spawn_server(settings: StartServer) -> Server:
    """Start a server as a child process, which ends with the calling thread."""
    page = () if settings.mailbox is None else (settings.mailbox.page,)
    with ExitStack() as failed:
        ours, theirs = socket.socketpair()
        failed.enter_context(ours)
        with theirs:
            process = spawn_child("coserve.engine.lora_server.process", theirs, *page)
        server = Server.begin(process, ours, settings)
        failed.pop_all()
    return server


def start_servers(
    settings: Sequence[StartServer],
    answered: Answered,
    mailboxes: Mailboxes | None = None,
    note: str = "",
    starting: float = START_SILENCE,
    launch: Callable[[StartServer], Server] = spawn_server,
    meeting: Path | None = None,
) -> RunningServers:
    """Start servers and connect to them, over `mailboxes` or by gloo; blocks. `note`: see `RunningServers`; `starting`:
    seconds that they may take until they are about to connect; `launch`: starts a server, or connects to one that runs;
    `meeting`: a folder that all these processes can write to; None: the system's for temporary files. Raises
    `ConnectionError` if one does not come up, of which `PeerLost` and `IpcUnavailable` are kinds."""
    servers, ends = list[Server](), list[EngineEnd]()
    device, deadline = torch.device(settings[0].spec.device), settings[0].deadline
    try:
        with tempfile.TemporaryDirectory(dir=meeting) as folder:
            for own in settings:
                own = msgspec.structs.replace(own, rendezvous=f"{folder}/servers")
                if mailboxes is not None:
                    end, mailbox = mailboxes.offer(own.index)
                    ends.append(end)
                    own = msgspec.structs.replace(own, mailbox=mailbox)
                servers.append(launch(own))
            with within(starting, partial(_kill, servers)):
                _expect(servers, ServerReady)
            for server in servers:
                server.channel.send(ConnectTransport())
            transports: Sequence[EngineTransport] = ends
            if mailboxes is None:
                transports = join_servers(f"{folder}/servers", len(servers), device, deadline)
            with within(deadline, partial(_kill, servers)):
                if mailboxes is None:  # a slow server still reads the rendezvous file when all are connected
                    _expect(servers, ServerConnected)
                else:
                    mailboxes.try_out(deadline, partial(_expect, servers, ServerConnected))
        return RunningServers(settings[0].start, servers, transports, answered, deadline, note)
    except BaseException:
        _kill(servers)
        for end in ends:
            end.release()
        for server in servers:
            server.channel.close()
        raise


def _expect(servers: Sequence[Server], kind: type[ServerReady | ServerConnected]) -> None:
    for index, server in enumerate(servers):
        try:
            message = server.channel.receive()
        except PeerLost as error:
            raise PeerLost(f"LoRA server {index} ended while it started, or was not ready in time") from error
        assert isinstance(message, kind), f"expected {kind.__name__}, got {message}"
        if isinstance(message, ServerConnected) and message.refused:
            raise IpcUnavailable(message.refused)


def _kill(servers: Sequence[Server]) -> None:
    for server in servers:
        server.process.kill()
        server.process.wait()
