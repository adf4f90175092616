"""A LoRA server's process: `python -m coserve.engine.lora_server.process FD [SETTINGS]`.

`FD`: the socket to its engine, with which it ends. With `SETTINGS`, a `ListenerSettings` as JSON: a socket that has a
path, at which it listens for several engines.
"""

from __future__ import annotations

import socket
import sys

import msgspec

from coserve.core.link.lora_servers import ListenerSettings
from coserve.core.processes import obey_parent, same_bits_in_any_batch


def main() -> None:
    obey_parent()
    same_bits_in_any_batch()
    sock = socket.socket(fileno=int(sys.argv[1]))
    if len(sys.argv) == 2:
        from coserve.engine.lora_server.server import serve  # imports torch, which takes seconds

        serve(sock)
        return
    sock.listen()  # engines may connect while torch is imported
    settings = msgspec.json.decode(sys.argv[2], type=ListenerSettings)
    from coserve.engine.lora_server.sessions import serve_engines

    serve_engines(sock, settings)


if __name__ == "__main__":
    main()
