"""A mailbox between two GPUs: messages both ways while both are busy, and a peer that ends while the GPU waits."""

from __future__ import annotations

import random
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial

import msgspec
import pytest
import torch

from coserve.core.link.channel import Channel
from coserve.core.processes import spawn_child
from coserve.engine.lora_server.ipc import EngineEnd, Mailboxes, mailbox_sizes
from coserve.engine.lora_server.messages import AnyFromServer, ServerConnected, StartServer
from coserve.engine.lora_server.transport import TensorSpec, within
from coserve.model.base import wrap_base
from tests.support.families import tiny_family
from tests.support.ipc_peer import Echo
from tests.support.lora_servers import start_message

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
DEVICE = torch.device("cuda:0")
TOKENS = 1 << 14

EngineChannel = Channel[StartServer | Echo, AnyFromServer]


@contextmanager
def peer() -> Iterator[tuple[EngineEnd, EngineChannel, subprocess.Popen[bytes], int]]:
    """The engine's end, the socket and the process of a peer on the second GPU, and the longest message's bytes. The
    mailbox is offered on a thread of its own, as an engine does."""
    spec = wrap_base(tiny_family("mixtral"), name="mixtral").spec
    boxes = Mailboxes(DEVICE, spec, 1, TOKENS)
    with ThreadPoolExecutor(1) as other:
        end, mailbox = other.submit(boxes.offer, 0).result()
    ours, theirs = socket.socketpair()
    with theirs:
        process = spawn_child("tests.support.ipc_peer", theirs, mailbox.page)
    start = start_message(spec, device="cuda:1", mailbox=mailbox)
    try:
        with closing(EngineChannel(ours, msgspec.msgpack.Decoder(AnyFromServer))) as channel:
            channel.send(start)

            def connected() -> None:
                assert channel.receive() == ServerConnected()

            with within(120.0, process.kill):
                boxes.try_out(60.0, connected)
            yield end, channel, process, min(mailbox_sizes(spec, TOKENS))
    finally:
        process.kill()
        process.wait()
        boxes.close()


def send(end: EngineEnd, channel: EngineChannel, number: int, x: torch.Tensor) -> None:
    end.send(number, [x])
    channel.send(Echo(number=number, rows=len(x)))


def test_messages_of_any_size_arrive_while_both_gpus_are_busy() -> None:
    chance, kept, busy = random.Random(7), [], torch.zeros(2048, 2048, device=DEVICE)
    with peer() as (end, channel, _, most):
        for number in range(1, 600):
            rows = chance.choice([1, chance.randrange(1, 4096), chance.randrange(1, most // 4 + 1), most // 4])
            x = torch.full((rows,), number, dtype=torch.int32, device=DEVICE)
            x[chance.randrange(rows)] = -number
            send(end, channel, number, x)
            if number % 5 == 0:
                busy = busy @ busy
            (found,) = end.receive(number, [TensorSpec((rows,), torch.int32)])
            kept.append(torch.equal(found, x + 1) if number % 50 == 0 else (found == x + 1).all())
        assert all(map(bool, kept)) and end.waiting is None


def test_a_graph_replays_exchanges_beside_others() -> None:
    """Its numbers are the same each time: the host sets the words back, and the peer waits before it sends."""
    with peer() as (end, channel, _, _):
        x, spec = torch.zeros(777, dtype=torch.int32, device=DEVICE), TensorSpec((777,), torch.int32)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(DEVICE)

        def exchanges() -> list[torch.Tensor]:
            found = []
            for number in (1, 2, 3):
                end.send(number, [x + number])
                found += end.receive(number, [spec])
            return found

        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            recorded = exchanges()
        for step in range(100):
            torch.cuda.synchronize(DEVICE)
            end.begin()
            for number in (1, 2, 3):
                channel.send(Echo(number=number, rows=len(x)))
            x.fill_(step)
            if step % 3:
                graph.replay()
            found = recorded if step % 3 else exchanges()
            assert [int(one.sum()) for one in found] == [777 * (step + number + 1) for number in (1, 2, 3)]
        assert end.waiting is None


def test_a_stream_goes_on_when_its_peer_has_ended() -> None:
    """Without a message from the GPU that ended, and without a fault."""
    with peer() as (end, channel, process, _):
        x = torch.zeros(1 << 10, dtype=torch.int32, device=DEVICE)
        end.send(2, [x])
        sent, after = torch.cuda.Event(), torch.cuda.Event()
        sent.record()
        channel.send(Echo(number=2, rows=0))
        end.receive(2, [TensorSpec((1 << 10,), torch.int32)])
        after.record()
        sent.synchronize()
        with within(2.0, partial(_end, process, end)):
            assert end.waiting is not None and not after.query()
            torch.cuda.synchronize(DEVICE)
        assert torch.equal(x + 1, torch.ones_like(x))


def _end(process: subprocess.Popen[bytes], end: EngineEnd) -> None:
    process.kill()
    process.wait()
    end.release()
