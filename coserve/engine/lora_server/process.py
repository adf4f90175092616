"""A LoRA server's process: `python -m coserve.engine.lora_server.process FD`. `FD`: its socket to the engine, with
which it ends."""

from __future__ import annotations

import socket
import sys

import msgspec

from coserve.core.link.channel import Channel
from coserve.core.processes import obey_parent, same_bits_in_any_batch
from coserve.engine.lora_server.messages import AnyFromServer, AnyToServer


def main() -> None:
    obey_parent()
    same_bits_in_any_batch()
    sock = socket.socket(fileno=int(sys.argv[1]))
    channel = Channel[AnyFromServer, AnyToServer](sock, msgspec.msgpack.Decoder(AnyToServer))
    from coserve.engine.lora_server.server import serve  # imports torch, which takes seconds

    serve(channel)


if __name__ == "__main__":
    main()
