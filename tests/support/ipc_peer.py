"""A process that sends messages back over a mailbox, with 1 added, while its GPU is busy: `python -m
tests.support.ipc_peer FD`. After a message of no rows it is silent."""

from __future__ import annotations

import socket
import sys
import time
from contextlib import suppress

import msgspec
import torch

from coserve.core.link.channel import Channel
from coserve.core.link.link import PeerLost
from coserve.core.processes import obey_parent
from coserve.engine.lora_server.messages import AnyFromServer, ServerConnected, StartServer, ToServer
from coserve.engine.lora_server.server import connect, take_page
from coserve.engine.lora_server.transport import TensorSpec


class Echo(ToServer, frozen=True, kw_only=True):
    """Announces message `number`, of `rows` int32 numbers."""

    number: int
    rows: int


def main() -> None:
    obey_parent()
    sock = socket.socket(fileno=int(sys.argv[1]))
    channel = Channel[AnyFromServer, StartServer | Echo](sock, msgspec.msgpack.Decoder(StartServer | Echo))
    start = channel.receive()
    assert isinstance(start, StartServer)
    torch.cuda.set_device(torch.device(start.device))
    assert start.mailbox is not None
    transport = connect(start, take_page(start.mailbox.page))
    channel.send(ServerConnected())
    busy = torch.zeros(2048, 2048, device=start.device)
    with suppress(PeerLost):
        while True:
            message = channel.receive()
            assert isinstance(message, Echo)
            if not message.rows:
                time.sleep(60.0)
            (found,) = transport.receive(message.number, [TensorSpec((message.rows,), torch.int32)])
            if message.number % 3 == 0:
                busy = busy @ busy
            transport.send(message.number, [found + 1])


if __name__ == "__main__":
    main()
