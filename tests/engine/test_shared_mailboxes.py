"""Mailboxes between a LoRA server and several engines, with host memory in place of GPUs' and threads of one process.
With processes and GPUs: `tests/gpu/test_shared_mailboxes_gpu.py`."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import cast

import pytest
import torch
from msgspec.structs import replace

from coserve.core.errors import LoraServerLost
from coserve.core.link.lora_servers import socket_path
from coserve.engine.lora_server.gpu_driver import IpcUnavailable
from coserve.engine.lora_server.ipc import EngineEnd, Mailboxes, ServerEnd
from coserve.engine.lora_server.messages import (
    ConnectTransport,
    LoadPairs,
    PairsLoaded,
    ServerReady,
    StartServer,
)
from coserve.engine.lora_server.placement import part_of
from coserve.engine.lora_server.reading import PairsReader
from coserve.engine.lora_server.running import RunningServers, Server, Told, start_servers
from coserve.engine.lora_server.server import serve
from coserve.engine.lora_server.sessions import Sessions, Watch
from coserve.engine.lora_server.shared import connect_to_server
from coserve.engine.lora_server.terms import HeldPairs
from coserve.kernels.lora.segments import Segments
from coserve.model.base import Base, wrap_base
from coserve.state.folder import DataFolder
from tests.support.families import tiny_family
from tests.support.host_stream import HostDriver
from tests.support.lora_servers import REFS, Ended, digests_of, save_adapters, start_message

CPU = torch.device("cpu")
SEGMENTS = Segments((0, 5, 9), (0, 1))


@pytest.fixture(scope="module")
def base() -> Base:
    return wrap_base(tiny_family("mixtral"), name="mixtral")


@pytest.fixture(scope="module")
def data(base: Base, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    save_adapters("mixtral", base, folder)
    return folder


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a server, which serves until the end of the test."""
    monkeypatch.setattr("coserve.engine.lora_server.ipc.GpuDriver", HostDriver)
    sessions, threads = Sessions(CPU), list[threading.Thread]()

    def accept() -> None:
        with suppress(OSError):  # the end of the test
            while True:
                threads.append(threading.Thread(target=sessions.serve, args=listening.accept()[:1]))
                threads[-1].start()

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(socket_path(tmp_path, 0)))
        listening.listen()
        accepting = threading.Thread(target=accept)
        accepting.start()
        yield tmp_path
        listening.shutdown(socket.SHUT_RDWR)
        accepting.join()
    for thread in threads:
        thread.join()
    assert not HostDriver.open_now


def start(
    base: Base, data: Path, at: Path, boxes: Mailboxes | None, deadline: float = 60.0, kind: str = "cpu"
) -> RunningServers:
    """An engine's server, which holds both adapters in the slots 0 and 1. `kind`: what it says of its
    device."""

    def launch(settings: StartServer) -> Server:
        if settings.mailbox is not None:
            settings = replace(settings, mailbox=replace(settings.mailbox, device=kind))
        return connect_to_server(at, settings)

    settings = start_message(base.spec, data, deadline)
    loaded = threading.Semaphore(0)

    def told(_: int, message: Told) -> None:
        assert not hasattr(message, "message"), message
        if isinstance(message, PairsLoaded):
            loaded.release()

    running = start_servers([settings], told, boxes, launch=launch, meeting=at)
    for slot, ref in enumerate(REFS):
        running.send(0, LoadPairs(number=slot, slot=slot, ref=ref, digests=digests_of(DataFolder(data).adapter(ref))))
    for _ in REFS:
        assert loaded.acquire(timeout=60.0)
    return running


@contextmanager
def engine(base: Base, data: Path, at: Path, deadline: float = 60.0) -> Iterator[RunningServers]:
    boxes = Mailboxes(CPU, base.spec, 1, 64)
    running = start(base, data, at, boxes, deadline)
    assert isinstance(running.connections[0].transport, EngineEnd)
    try:
        yield running
    finally:
        running.lose("the test ends")
        running.end()
        boxes.close()


def check(base: Base, data: Path, *engines: RunningServers) -> None:
    """A step of each engine, between whose exchanges those of the others come."""
    part = part_of(base.spec, 0, 1, 1)
    held, read = HeldPairs(part.sites, len(REFS), CPU), PairsReader(part, base.spec, DataFolder(data), CPU)
    for slot, ref in enumerate(REFS):
        held.reserve(slot, slot)
        for run in (pairs := read(ref, None)).runs:
            held.add(slot, slot, run, pairs.rank)
        held.end(slot, slot)
    own = held.step(SEGMENTS.bounds, SEGMENTS.adapters, held.version)
    steps = [running.step(SEGMENTS, (0, 1)) for running in engines]
    for up, down in zip(*[iter(part.sites)] * 2, strict=True):
        tokens, chosen = SEGMENTS.bounds[-1], part.sites[up].chosen
        x_TD = torch.randn(tokens, part.sites[up].in_features)
        h_SI = torch.randn(tokens * chosen, part.sites[down].in_features)
        weights_TK, chosen_TK = torch.rand(tokens, part.experts).topk(chosen)
        wanted = own.gate_up(up, x_TD, chosen_TK), own.down(down, h_SI, weights_TK)
        pending = [step.gate_up(up, x_TD, chosen_TK) for step in steps if step is not None]
        assert [torch.allclose(terms(), wanted[0], atol=1e-5) for terms in pending] == [True] * len(engines)
        pending = [step.down(down, h_SI, weights_TK) for step in steps if step is not None]
        assert [torch.allclose(terms(), wanted[1], atol=1e-5) for terms in pending] == [True] * len(engines)
    assert not any(running.lost for running in engines)


def test_engines_share_a_server_over_mailboxes_of_their_own(base: Base, data: Path, at: Path) -> None:
    """One comes back with the same mailbox."""
    with engine(base, data, at) as one:
        boxes = Mailboxes(CPU, base.spec, 1, 64)
        for _ in range(2):
            two = start(base, data, at, boxes)
            assert HostDriver.open_now == 2
            check(base, data, one, two)
            two.lose("it goes")
            two.end()
            assert HostDriver.open_now == 1, "the connection is closed once the mailbox is"
        boxes.close()
        check(base, data, one)


def test_an_engine_that_dies_in_a_step_is_no_loss_for_another(base: Base, data: Path, at: Path) -> None:
    """Its connection closes; nobody ends the waits of the server's stream but the server."""
    with engine(base, data, at) as one, engine(base, data, at) as two:
        two.begin(SEGMENTS.bounds, SEGMENTS.adapters)
        check(base, data, one)
        two.servers[0].process.kill()
        assert two.servers[0].process.wait() == 0
        assert HostDriver.open_now == 1
        check(base, data, one)


def test_an_engine_that_is_silent_in_a_step_leaves_and_knows_it(base: Base, data: Path, at: Path) -> None:
    """Also before it sees that the connection is closed: its step must not count."""
    with engine(base, data, at) as one, engine(base, data, at, deadline=0.5) as two:
        two.begin(SEGMENTS.bounds, SEGMENTS.adapters)
        two.wait()
        assert two.connections[0].transport.left
        with pytest.raises(LoraServerLost):
            two.begin(SEGMENTS.bounds, SEGMENTS.adapters)
        check(base, data, one)


def test_an_engine_knows_of_a_step_that_was_given_up_before_the_connection_closes(
    base: Base, data: Path, at: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(base, data, at) as one:
        monkeypatch.setattr(EngineEnd, "left", True)
        assert one.lost and "given up a step" in one.why


def test_an_engine_that_computes_nothing_is_not_silent(base: Base, data: Path, at: Path) -> None:
    """Between two steps it may be so for longer than the timeout."""
    with engine(base, data, at, deadline=0.5) as one:
        check(base, data, one)
        assert not threading.Event().wait(1.6)
        check(base, data, one)


def test_an_engine_that_ends_before_its_first_message_holds_nothing(base: Base, data: Path, at: Path) -> None:
    boxes = Mailboxes(CPU, base.spec, 1, 64)
    _, mailbox = boxes.offer(0)
    server = connect_to_server(at, start_message(base.spec, data, mailbox=mailbox))
    with closing(server.channel):
        assert server.channel.receive() == ServerReady()
        server.channel.send(ConnectTransport())
        server.process.kill()
        assert server.process.wait() == 0
    assert not HostDriver.open_now
    boxes.close()


def test_a_server_of_one_engine_keeps_no_file_open(base: Base, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor of the page that it has inherited."""
    monkeypatch.setattr("coserve.engine.lora_server.ipc.GpuDriver", HostDriver)
    monkeypatch.setattr("coserve.engine.lora_server.server.set_up_logging", lambda *_: None)
    files, threads = list[int](), list[threading.Thread]()

    def run(sock: socket.socket) -> None:
        with sock:
            serve(sock)

    def launch(settings: StartServer) -> Server:
        ours, theirs = socket.socketpair()
        assert settings.mailbox is not None
        files.append(os.dup(settings.mailbox.page))
        threads.append(threading.Thread(target=run, args=(theirs,)))
        threads[0].start()
        return Server.begin(Ended(ours), ours, replace(settings, mailbox=replace(settings.mailbox, page=files[0])))

    boxes = Mailboxes(CPU, base.spec, 1, 64)
    running = start_servers([start_message(base.spec, data)], lambda *_: None, boxes, launch=launch)
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(files[0])
    finally:
        running.lose("the test ends")
        running.end()
        threads[0].join()
        boxes.close()


class Slow:
    """A server's end whose engine sends the second message after the first look, and then nothing."""

    def __init__(self) -> None:
        self.looks, self.given_up = 0, threading.Event()

    @property
    def waiting(self) -> tuple[int, int] | None:
        self.looks += not self.given_up.is_set()
        return 0, min(self.looks, 2)

    def give_up(self) -> None:
        self.given_up.set()


def test_an_engine_is_silent_that_has_sent_nothing_between_two_looks() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, closing(Watch(theirs, 0.05)) as watch:
        slow = Slow()
        watch.look_at(cast("ServerEnd", slow))
        assert slow.given_up.wait(60.0) and slow.looks == 3


def test_mailboxes_of_another_kind_of_device_are_refused(base: Base, data: Path, at: Path) -> None:
    """The engine connects again, without them."""
    with pytest.raises(IpcUnavailable, match="the engine computes on cuda, and the LoRA server on cpu"):
        start(base, data, at, Mailboxes(CPU, base.spec, 1, 64), kind="cuda")
    running = start(base, data, at, None)
    check(base, data, running)
    running.lose("the test ends")
    running.end()
