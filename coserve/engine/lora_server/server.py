"""A LoRA server: it holds adapters' pairs of some experts in some layers, and no weights of the base."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import msgspec
import torch

from coserve.core.link.channel import Channel
from coserve.core.link.link import PeerLost
from coserve.core.logs import log_event, set_up_logging
from coserve.engine.lora_server.gpu_driver import IpcUnavailable
from coserve.engine.lora_server.ipc import ServerEnd, SharedPage, Streams, answer_trial, open_mailbox
from coserve.engine.lora_server.messages import (
    SLOTS,
    AnyFromServer,
    AnyToServer,
    BeginStep,
    ConnectTransport,
    DropPairs,
    LoadPairs,
    PairsLoaded,
    PairsRefused,
    ServerConnected,
    ServerReady,
    StartServer,
)
from coserve.engine.lora_server.placement import part_of
from coserve.engine.lora_server.reading import PairsReader, ReadPairs
from coserve.engine.lora_server.terms import HeldPairs, StepTerms
from coserve.engine.lora_server.transport import ServerTransport, TensorSpec, join_engine
from coserve.kernels.gpu.device import use_device
from coserve.lora.store.store import READERS
from coserve.state.folder import DataFolder

log = logging.getLogger(__name__)

ServerChannel = Channel[AnyFromServer, AnyToServer]
Share = Callable[[ReadPairs, Hashable], ReadPairs]
"""Wraps how an engine's adapters are read; its second argument is what their pairs depend on besides the files."""


def serve(sock: socket.socket) -> None:
    """Serve one engine, which has started this process, until it is gone."""
    channel = make_channel(sock)
    try:
        message = start_message(channel)
        set_up_logging(f"lora-server-{message.index}", message.logs)
        page = None if message.mailbox is None else take_page(message.mailbox.page)
        with Streams(torch.device(message.device)).one():
            serve_engine(channel, message, page)
    except ConnectionError:
        log_event(log, "LoRA server stops")


def make_channel(sock: socket.socket) -> ServerChannel:
    return ServerChannel(sock, msgspec.msgpack.Decoder(AnyToServer))


def start_message(channel: ServerChannel) -> StartServer:
    """Receive an engine's settings. Raises `PeerLost`."""
    message = channel.receive()
    assert isinstance(message, StartServer), f"expected the settings first, got {message}"
    return message


def take_page(file: int) -> SharedPage:
    """Map a mailbox's page, and close its descriptor."""
    try:
        return SharedPage(file)
    finally:
        os.close(file)


def serve_engine(
    channel: ServerChannel,
    message: StartServer,
    page: SharedPage | None,
    share: Share = lambda read, _: read,
    connected: Callable[[], None] = lambda: None,
    opened: Callable[[ServerEnd], None] = lambda _: None,
) -> None:
    """Serve an engine until it is gone, which raises `ConnectionError`. `page`: of its mailbox; `connected` is called
    when it is connected; `opened`: see `connect`. Steps run on the thread's stream, and adapters are read on the
    device's default one. Raises as `LoraServer.run` does."""
    torch.set_num_threads(message.threads)
    spec, device = message.spec, torch.device(message.device)
    part = part_of(spec, message.index, message.servers, message.ep)
    pairs = HeldPairs(part.sites, SLOTS, device)
    read = PairsReader(part, spec, DataFolder(Path(message.data_dir)), device)
    channel.send(ServerReady())
    ready = channel.receive()
    assert isinstance(ready, ConnectTransport), f"expected to connect now, got {ready}"
    try:
        transport = connect(message, page, opened)
    except IpcUnavailable as error:
        channel.send(ServerConnected(refused=str(error)))
        return
    server = LoraServer(channel, transport, pairs, share(read, read.form), message.start, partial(use_device, device))
    with closing(server), closing(transport):  # the device is at its end before pairs are freed
        channel.send(ServerConnected())
        connected()
        server.run(getattr(torch, spec.dtype))


def connect(
    settings: StartServer, page: SharedPage | None, opened: Callable[[ServerEnd], None] = lambda _: None
) -> ServerTransport:
    """Connect a server to its engine. `opened` is called with the end of a mailbox before this waits for a message of
    it. Raises `IpcUnavailable`, or another `ConnectionError` if the engine or one of its servers does not connect
    within `settings.deadline` seconds."""
    device = torch.device(settings.device)
    if settings.mailbox is None:
        return join_engine(settings.rendezvous, settings.index, settings.servers, device, settings.deadline)
    if page is None:
        raise ConnectionError("it has sent no page for its mailbox")
    end = open_mailbox(settings.mailbox, page, device)
    with ExitStack() as failed:
        failed.callback(end.close)
        opened(trial := end.for_trial())
        answer_trial(trial)
        opened(end)
        failed.pop_all()
    return end


class LoraServer:
    """Carries out an engine's messages, in order; adapters are read on threads."""

    def __init__(
        self,
        channel: ServerChannel,
        transport: ServerTransport,
        pairs: HeldPairs,
        read: ReadPairs,
        start: int,
        start_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """`start`: number of the servers' start; `start_thread` is called first on each thread that reads adapters."""
        self._channel, self._transport, self._pairs, self._read, self._start = channel, transport, pairs, read, start
        self._threads = ThreadPoolExecutor(READERS, "adapters", start_thread)

    def close(self) -> None:
        """Drop all adapters; reads that are not at their end are given up."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pairs.close()

    @torch.no_grad()
    def run(self, dtype: torch.dtype) -> None:
        """Serve until the engine is gone, which raises `PeerLost`. `dtype`: of activations. Raises `LookupError` for a
        step whose adapters are not in their slots."""
        while True:
            match self._channel.receive():
                case LoadPairs() as load:
                    self._pairs.reserve(load.slot, load.number)
                    self._threads.submit(self._load, load)
                case DropPairs(slot=slot):
                    self._pairs.clear(slot)
                case BeginStep() as step:
                    if step.start != self._start:
                        raise LookupError(f"expected a step of start {self._start}, got one of {step.start}")
                    self._compute(self._pairs.step(step.bounds, step.slots, step.version), step.bounds[-1], dtype)
                    self._transport.finish()  # what it reads may be dropped, and its memory written, by other streams
                case other:
                    raise LookupError(f"expected no {type(other).__name__} now")

    def _compute(self, terms: StepTerms, tokens: int, dtype: torch.dtype) -> None:
        """Exchange all messages of a step of T = `tokens` tokens. With mailboxes the host launches what follows some of
        the engine's messages before they are there."""
        sites = self._pairs.sites.items()
        for number, (name, site) in enumerate(sites, 1):
            chosen = tokens, site.chosen
            if number % 2:  # of each layer gate and up first, then down
                specs = TensorSpec((tokens, site.in_features), dtype), TensorSpec(chosen, torch.int64)
                found = terms.gate_up(name, *self._transport.receive(number, specs))
            else:
                specs = TensorSpec((tokens * site.chosen, site.in_features), dtype), TensorSpec(chosen, torch.float32)
                found = terms.down(name, *self._transport.receive(number, specs))
            self._transport.send(number, [found])

    def _load(self, load: LoadPairs) -> None:
        """Read an adapter into its slot; on a thread. The engine may use it as soon as its first layers are there."""
        told = False
        try:
            found = self._read(load.ref, load.digests)
            for pairs in found.runs if found.rank else [{}]:
                version = self._pairs.add(load.slot, load.number, pairs, found.rank)
                if not told:
                    self._tell(PairsLoaded(number=load.number, bytes=found.bytes, version=version))
                    told = True
            self._pairs.end(load.slot, load.number, kept=found.kept)
        except Exception as error:
            self._pairs.end(load.slot, load.number, error)
            if told:  # a step that waits for the other layers ends the server
                log.warning("adapter %s: its last layers cannot be read", load.ref, exc_info=error)
            else:
                log.warning("adapter %s cannot be read", load.ref, exc_info=error)
                self._tell(PairsRefused(number=load.number, message=f"{type(error).__name__}: {error}"[:300]))

    def _tell(self, answer: AnyFromServer) -> None:
        try:
            self._channel.send(answer)
        except PeerLost:
            log_event(log, "an adapter was loaded for an engine that is gone")
