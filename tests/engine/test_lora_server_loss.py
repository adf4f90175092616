"""Requests over LoRA servers: fewer pages for their adapters, and what a lost server means for whom."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from threading import Event

import msgspec
import pytest
import torch
from torch import Tensor

from coserve.core.errors import LoraServerLost
from coserve.core.link.channel import Channel
from coserve.core.types import AdapterDigests, AdapterRef
from coserve.engine.lora_server.gpu_driver import IpcUnavailable
from coserve.engine.lora_server.ipc import ServerEnd
from coserve.engine.lora_server.messages import AnyFromServer, AnyToServer, DropPairs
from coserve.engine.lora_server.placement import part_of
from coserve.engine.lora_server.recorded_step import RecordedStep
from coserve.engine.lora_server.running import Answered, RunningServers, Server
from coserve.engine.lora_server.servers import LoraServers
from coserve.engine.lora_server.start import load_on_servers
from coserve.engine.lora_server.transport import EngineTransport, ServerTransport, TensorSpec
from coserve.generate.execution.eager import EagerExecutor
from coserve.generate.execution.graph_executor import GraphExecutor
from coserve.generate.execution.interface import StepExecutor
from coserve.generate.generator import Generator
from coserve.kernels.lora.segments import Segments
from coserve.lora.store.files import load_adapter
from coserve.lora.store.store import AdapterStore
from coserve.memory.kv import KvCache
from coserve.model.base import Base, wrap_base
from coserve.model.fused import FusedBase
from coserve.model.lora import LoraWeights
from coserve.state.folder import DataFolder
from tests.support.executors import PreparedExecutor
from tests.support.families import tiny_family
from tests.support.generation import answers, collect, prompt, request
from tests.support.host_stream import mailbox_ends
from tests.support.lora_backends import GROUPED
from tests.support.lora_servers import REFS, Ended, in_threads, save_adapters

REQUESTS = [request("a", prompt(6), ref=REFS[0]), request("base", prompt(7)), request("b", prompt(5), ref=REFS[1])]


@pytest.fixture(scope="module")
def base() -> Base:
    return wrap_base(tiny_family("mixtral"), name="mixtral")


def make(
    base: Base, folder: Path, tokens: int, own: LoraServers | None = None, graphs: list[GraphExecutor] | None = None
) -> tuple[Generator, AdapterStore]:
    """`graphs`: gets the executor, which has CUDA graphs: on a CPU their steps run as they are."""

    def read(ref: AdapterRef, digests: AdapterDigests | None) -> LoraWeights:
        path = DataFolder(folder).adapter(ref)
        return load_adapter(path, base.spec, dtype=torch.float32, digests=digests)

    if own is None:
        store = AdapterStore(read, 1 << 30)
    else:
        store = AdapterStore(load_on_servers(read, own), 1 << 30, mirror=own, remote=own)
    kv = KvCache.for_base(base, tokens, 4)
    executor: StepExecutor = EagerExecutor(base, kv, GROUPED, own)
    if graphs is not None:
        fused = FusedBase(base, compiled=False, opaque_experts=True)
        executor = PreparedExecutor(fused, kv, executor, max_running=4, step_tokens=16, remote=own)
        graphs.append(executor)
    return Generator(base, store, kv, executor, max_running=4, step_tokens=16), store


class Silent:
    """A server's end that sends so many answers only."""

    def __init__(self, end: ServerTransport, answers: int) -> None:
        self._end, self._left = end, answers
        self.receive, self.finish, self.close = end.receive, end.finish, end.close

    def send(self, number: int, tensors: Sequence[Tensor]) -> None:
        if self._left:
            self._left -= 1
            self._end.send(number, tensors)


@contextmanager
def once(
    base: Base, folder: Path, start_all: Callable[..., RunningServers] = in_threads
) -> Iterator[tuple[LoraServers, list[RunningServers]]]:
    """Two servers that are not started again."""
    found = list[RunningServers]()

    def start(number: int, told: Answered) -> RunningServers:
        if found:
            raise RuntimeError("not again")
        found.append(start_all(base, folder, 2, told))
        return found[0]

    own = LoraServers(2, start, 60.0)
    try:
        own.wait()
        yield own, found
    finally:
        own.close()


@pytest.mark.filterwarnings("ignore")
def test_requests_over_servers_survive_their_loss(base: Base, tmp_path: Path) -> None:
    """Their adapters take fewer pages; after a loss the engine computes them whole, from the tokens so far. The error
    is for those alone whose adapters do not fit."""
    save_adapters("mixtral", base, tmp_path)
    expected = collect(make(base, tmp_path, 512)[0], REQUESTS)
    with once(base, tmp_path) as (own, found):
        gen, store = make(base, tmp_path, 512, own)
        for one in REQUESTS:
            gen.add(one)
        assert store.pages(REFS[0]) < 10 and [info.adapters for info in store.lora_servers] == [2, 2]
        tokens = {one.id: list[int]() for one in REQUESTS}
        small, narrow = make(base, tmp_path, 64, own)
        for one in REQUESTS[:2]:
            small.add(one)
        for _ in range(4):
            for message in gen.step():
                tokens[message.id].extend(message.tokens)
            small.step()
        assert store.in_pages(REFS[0]).remote >= 0 and narrow.in_pages(REFS[0]).remote >= 0
        found[0].servers[1].process.kill()
        rest = collect(gen, [])
        assert {id: (tokens[id] + own, finished) for id, (own, finished) in rest.items()} == expected
        assert store.pages(REFS[0]) > 16 and gen.pages_used == 0
        ended = answers(small)
        assert ended["a"].failed == "lora_server_lost" and not ended["base"].failed
        assert ended["base"].tokens == expected["base"][0][4:]
        with pytest.raises(LoraServerLost, match="does not fit"):
            small.add(REQUESTS[0])
        assert collect(gen, [request("later", prompt(6), ref=REFS[0])])["later"] == expected["a"]
        assert "ready" not in {info.state for info in own.states()}


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_did_not_get_its_last_terms_is_undone(base: Base, tmp_path: Path) -> None:
    """A stream waits for terms in place of the host, which learns of the loss when the step has gone on without
    them."""
    save_adapters("mixtral", base, tmp_path)
    expected = collect(make(base, tmp_path, 512)[0], REQUESTS)
    steps = iter([1000, 5])  # the second server has the last layer, with two messages a step
    ends = lambda end: Silent(end, next(steps))
    with once(base, tmp_path, partial(in_threads, deadline=1.0, mailboxes=True, ends=ends)) as (own, found):
        gen, _ = make(base, tmp_path, 512, own)
        assert collect(gen, REQUESTS) == expected and found[0].why == "LoRA server 1 did not answer in time"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_padded_steps_of_graphs_over_servers_have_the_coupled_tokens(base: Base, tmp_path: Path) -> None:
    """A server is lost in a step of a graph."""
    save_adapters("mixtral", base, tmp_path)
    expected = collect(make(base, tmp_path, 512)[0], REQUESTS)
    steps = iter([1000, 14 * 2])  # the second server has the last layer, with two messages a step
    ends = lambda end: Silent(end, next(steps))
    with once(base, tmp_path, partial(in_threads, deadline=1.0, mailboxes=True, ends=ends)) as (own, found):
        gen, _ = make(base, tmp_path, 512, own, executors := list[GraphExecutor]())
        for _ in range(2):
            assert collect(gen, REQUESTS) == expected
        assert any(footprint.remote for _, footprint in executors[0].decode_graphs)
        assert found[0].why == "LoRA server 1 did not answer in time"


def test_an_engine_loses_servers_that_gave_its_step_up(base: Base, tmp_path: Path) -> None:
    """Before it sees that they have closed the connection."""
    ends, keep = list[ServerTransport](), lambda end: ends.append(end) or end
    with once(base, tmp_path, partial(in_threads, mailboxes=True, ends=keep)) as (own, found):
        assert not own.losses
        assert isinstance(ends[1], ServerEnd)
        ends[1].give_up()
        assert own.losses == 1 and "LoRA server 1 has given up a step" in found[0].why


class Unreachable:
    """An engine's end of a mailbox whose GPU fails."""

    waiting, recordable, left = None, True, False

    def begin(self) -> None: ...

    def launched(self) -> None: ...

    def send(self, number: int, tensors: Sequence[Tensor]) -> None:
        raise IpcUnavailable("cuMemcpyDtoDAsync: an illegal memory access")

    def receive(self, number: int, specs: Sequence[TensorSpec]) -> list[Tensor]:
        raise AssertionError

    def leave(self) -> None: ...

    def release(self) -> None: ...


class Recording(Unreachable):
    """An engine's end of a mailbox while a graph is captured: nothing runs."""

    def send(self, number: int, tensors: Sequence[Tensor]) -> None: ...

    def receive(self, number: int, specs: Sequence[TensorSpec]) -> list[Tensor]:
        return [torch.zeros(spec.shape, dtype=spec.dtype) for spec in specs]


def idle_server(base: Base, ours: socket.socket, transport: EngineTransport, patience: float) -> RunningServers:
    """A server that does nothing, behind this socket and transport."""
    channel = Channel[AnyToServer, AnyFromServer](ours, msgspec.msgpack.Decoder(AnyFromServer))
    server = Server(Ended(ours), channel, part_of(base.spec, 0, 1, 1))
    return RunningServers(1, [server], [transport], lambda *_: None, patience)


@contextmanager
def one_server(base: Base, transport: EngineTransport, patience: float = 60.0) -> Iterator[tuple[RunningServers, str]]:
    """A server that does nothing, behind this transport, and the name of its first parameter."""
    ours, theirs = socket.socketpair()
    running = idle_server(base, ours, transport, patience)
    with closing(theirs):
        yield running, next(iter(running.servers[0].part.sites))
        assert running.lost
        running.end()


def test_an_error_of_the_driver_loses_the_servers(base: Base) -> None:
    """They are started again, where each later step would fail, too."""
    with one_server(base, Unreachable()) as (running, site):
        step = running.step(Segments((0, 1), (0,)), [0])
        assert step is not None
        with pytest.raises(LoraServerLost):
            step.gate_up(site, torch.zeros(1, 8), torch.zeros(1, 1))


def test_a_step_that_ended_between_two_exchanges_loses_the_servers(base: Base) -> None:
    """By an error of the engine's own: they wait for the others, which have the numbers of the next step's."""
    ours, _ = mailbox_ends(1 << 16, 1 << 16)
    with one_server(base, ours) as (running, site):
        step = running.step(Segments((0, 2, 3), (0, -1)), [0])
        assert step is not None and running.step(Segments((0, 3), (0,)), [-1]) is None
        step.gate_up(site, torch.zeros(3, 8), torch.zeros(3, 2))
        with pytest.raises(LoraServerLost, match="a step that failed"):
            running.step(Segments((0, 1), (0,)), [0])


def test_a_capture_does_not_end_a_step_that_failed(base: Base) -> None:
    """It comes to all exchanges, but the servers still wait for those of the step."""
    one, x = Segments((0, 1), (0,)), torch.zeros(1, 8)
    with one_server(base, Recording()) as (running, _):
        recorded, sites = RecordedStep(running.connections, lambda: running), iter(running.connections[0].part.sites)
        recorded.begin(one, [0], 1)
        for up, down in zip(sites, sites, strict=True):
            recorded.gate_up(up, x, torch.zeros(1, 1))()
            recorded.down(down, x, torch.zeros(1, 1))()
        with pytest.raises(LoraServerLost, match="a step that failed"):
            recorded.begin(one, [0], 1)


def test_a_server_that_takes_no_messages_is_lost(base: Base) -> None:
    """Once its socket is full, it blocks whoever sends, and who that is may hold what a loss needs."""
    with one_server(base, Unreachable(), patience=0.1) as (running, _):
        while not running.lost:
            running.send(0, DropPairs(slot=0))
        assert "takes no messages" in running.why


def test_nobody_waits_for_a_server_that_reads_nothing_to_drop_adapters(base: Base) -> None:
    """The engine's event loop drops them, and asks for the servers' state, which must not wait either."""
    ours, theirs = socket.socketpair()
    with closing(theirs):
        own = LoraServers(1, lambda number, told: idle_server(base, ours, Unreachable(), patience=5.0), 60.0)
        own.wait()
        for _ in range(2000):  # more than the socket holds
            own.load(REFS[0], None)
            own.dropped(REFS[0])
        assert own.states()[0].state == "ready"
        own.close()


@pytest.mark.filterwarnings("ignore")
def test_graphs_made_while_servers_are_started_again_have_their_exchanges(base: Base, tmp_path: Path) -> None:
    with once(base, tmp_path, partial(in_threads, mailboxes=True)) as (own, found):
        own.notify((changed := Event()).set)
        found[0].lose("gone")
        while not own.troubles:
            changed.wait()
            changed.clear()
        recorded = own.recorded()
        assert recorded is not None
        with pytest.raises(LoraServerLost, match="started again"):
            recorded.begin(Segments((0, 1), (0,)), [0], 1)
