"""The time of one exchange between an engine and a LoRA server, over a mailbox on the GPUs (`ipc`) and by gloo through
host memory, in a step of many: the tensors there, the terms back. Nothing is computed.

`python -m benchmarks.moe.ping_pong --transports --out R`
"""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial

import msgspec
import torch

from benchmarks.common.results import Results
from benchmarks.common.timing import synchronize
from coserve.core.link.channel import Channel
from coserve.core.link.link import PeerLost
from coserve.core.logs import LogSettings
from coserve.core.processes import obey_parent, spawn_child
from coserve.core.types import BaseSpec, SiteSpec
from coserve.engine.lora_server.ipc import Mailboxes
from coserve.engine.lora_server.messages import (
    AnyFromServer,
    AnyToServer,
    BeginStep,
    ServerConnected,
    StartServer,
)
from coserve.engine.lora_server.server import connect, take_page
from coserve.engine.lora_server.transport import EngineTransport, TensorSpec, join_servers, within
from coserve.workloads.provisioning import MoeShape

GATE_UP, DOWN = "gate_up", "down"
REPEATS, WARM = 5, 2
MOST_ROUNDS = 48
"""Pairs of exchanges in a repeat: as many as a step of Qwen3-30B-A3B has."""
DEADLINE = 60.0


def make_spec(shape: MoeShape, device: str) -> BaseSpec:
    """A base of one layer with these experts."""
    up = SiteSpec(shape.hidden, 2 * shape.inner, 0, experts=shape.experts, chosen=shape.chosen)
    down = SiteSpec(shape.inner, shape.hidden, 0, experts=shape.experts, chosen=shape.chosen)
    return BaseSpec(
        name="shape",
        fingerprint="",
        family="",
        dtype="bfloat16",
        device=device,
        layers=1,
        hidden=shape.hidden,
        vocab=1,
        context=1,
        eos_token_ids=(),
        sites={},
        default_targets=(),
        experts={GATE_UP: up, DOWN: down},
    )


def measure_transports(results: Results, shape: MoeShape, tokens: Sequence[int], *, tiny: bool) -> None:
    """Write `infini.exchange_us.WAY.tN`: microseconds of one exchange, a mean of those of gate and up and of down."""
    for way in ("gloo",) if tiny else ("ipc", "gloo"):
        try:
            _measure(way, results, shape, tokens, tiny=tiny)
        except Exception as error:  # noqa: BLE001 - the other way is still to measure
            failed = {"error": f"{type(error).__name__}: {error}"[:1000]}
            results.put(f"infini.failed.{way}", 1, "failures", None, about=failed)


def _measure(way: str, results: Results, shape: MoeShape, tokens: Sequence[int], *, tiny: bool) -> None:
    own, theirs = ("cpu", "cpu") if tiny else ("cuda:0", "cuda:1")
    spec, device = make_spec(shape, own), torch.device(own)
    boxes = Mailboxes(device, spec, 1, max(tokens)) if way == "ipc" else None
    end, mailbox = (None, None) if boxes is None else boxes.offer(0)
    ours, other = socket.socketpair()
    with tempfile.TemporaryDirectory() as folder, other:
        files = () if mailbox is None else (mailbox.page,)
        process = spawn_child("benchmarks.moe.transports", other, *files)
        try:
            channel = Channel[AnyToServer, AnyFromServer](ours, msgspec.msgpack.Decoder(AnyFromServer))
            start = StartServer(
                index=0,
                servers=1,
                ep=1,
                start=1,
                rendezvous=f"{folder}/servers",
                deadline=DEADLINE,
                spec=spec,
                data_dir="",
                device=theirs,
                threads=1,
                logs=LogSettings(),
                mailbox=mailbox,
            )
            with closing(channel), within(200.0, process.kill):
                channel.send(start)
                transport: EngineTransport
                if boxes is None or end is None:
                    (transport,) = join_servers(start.rendezvous, 1, device, DEADLINE)
                    _connected(channel)
                else:
                    boxes.try_out(DEADLINE, partial(_connected, channel))
                    transport = end
                for count in tokens:
                    whole, host = _time(transport, channel, shape, count, device)
                    about = {"tokens": count, "host_us": host, "repeats_us": whole}
                    value = sorted(whole)[len(whole) // 2]
                    results.put(f"infini.exchange_us.{way}.t{count}", value, "us", None, about=about)
        finally:
            process.kill()
            process.wait()
            if boxes is not None:
                boxes.close()


def _connected(channel: Channel[AnyToServer, AnyFromServer]) -> None:
    message = channel.receive()
    if not isinstance(message, ServerConnected) or message.refused:
        raise RuntimeError(f"expected a connected server, got {message}")


def _time(
    transport: EngineTransport,
    channel: Channel[AnyToServer, AnyFromServer],
    shape: MoeShape,
    tokens: int,
    device: torch.device,
) -> tuple[list[float], list[float]]:
    """Return microseconds of an exchange, and those after which the engine's host goes on, of each repeat."""
    rows = tokens * shape.chosen
    x_ND = torch.zeros(tokens, shape.hidden, dtype=torch.bfloat16, device=device)
    chosen_NK = torch.zeros(tokens, shape.chosen, dtype=torch.int64, device=device)
    h_SI = torch.zeros(rows, shape.inner, dtype=torch.bfloat16, device=device)
    weights_NK = torch.zeros(tokens, shape.chosen, device=device)
    y_SO, y_ND = TensorSpec((rows, 2 * shape.inner), x_ND.dtype), TensorSpec((tokens, shape.hidden), x_ND.dtype)
    rounds = max(2, min(MOST_ROUNDS, 12288 // tokens))
    whole, host = list[float](), list[float]()
    for _ in range(WARM + REPEATS):
        transport.begin()
        channel.send(BeginStep(start=1, version=rounds, bounds=(0, tokens), slots=(0,)))
        synchronize(device)
        began = time.perf_counter()
        exchanges = (((x_ND, chosen_NK), y_SO), ((h_SI, weights_NK), y_ND))
        for number, (sent, back) in enumerate(exchanges * rounds, 1):
            transport.send(number, sent)
            transport.receive(number, [back])
        host.append(round(1e6 * (time.perf_counter() - began) / (2 * rounds), 2))
        synchronize(device)
        whole.append(round(1e6 * (time.perf_counter() - began) / (2 * rounds), 2))
    return whole[WARM:], host[WARM:]


def main() -> None:
    """The server's process: answers with zeros."""
    obey_parent()
    sock = socket.socket(fileno=int(sys.argv[1]))
    channel = Channel[AnyFromServer, AnyToServer](sock, msgspec.msgpack.Decoder(AnyToServer))
    start = channel.receive()
    assert isinstance(start, StartServer), f"expected the settings, got {start}"
    device, item = torch.device(start.device), torch.bfloat16
    if device.type == "cuda":
        torch.cuda.set_device(device)
    transport = connect(start, None if start.mailbox is None else take_page(start.mailbox.page))
    channel.send(ServerConnected())
    up, down = start.spec.experts[GATE_UP], start.spec.experts[DOWN]
    with suppress(PeerLost):
        while True:
            step = channel.receive()
            assert isinstance(step, BeginStep), f"expected a step, got {step}"
            tokens, rows, chosen = step.bounds[-1], step.bounds[-1] * up.chosen, (step.bounds[-1], up.chosen)
            there = (
                [TensorSpec((tokens, up.in_features), item), TensorSpec(chosen, torch.int64)],
                [TensorSpec((rows, down.in_features), item), TensorSpec(chosen, torch.float32)],
            )
            sizes = (rows, up.out_features), (tokens, down.out_features)
            back = [torch.zeros(size, dtype=item, device=device) for size in sizes]
            for number in range(2 * step.version):  # so many rounds
                transport.receive(number + 1, there[number % 2])
                transport.send(number + 1, [back[number % 2]])


if __name__ == "__main__":
    main()
