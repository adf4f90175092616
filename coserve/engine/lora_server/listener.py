"""The process of a LoRA server that several engines use: `python -m coserve.engine.lora_server.listener FD SETTINGS`.
`FD`: a socket that has a path, at which it listens; `SETTINGS`: a `ListenerSettings` as JSON."""

from __future__ import annotations

import socket
import sys

import msgspec

from coserve.core.link.lora_servers import ListenerSettings
from coserve.core.logs.setup import set_up_logging
from coserve.core.processes import obey_parent, same_bits_in_any_batch


def main() -> None:
    obey_parent()
    same_bits_in_any_batch()
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.listen()  # engines may connect while torch is imported
    settings = msgspec.json.decode(sys.argv[2], type=ListenerSettings)
    from coserve.engine.lora_server.sessions import serve_engines  # imports torch, which takes seconds

    set_up_logging(f"lora-server-{settings.index}", settings.logs)
    serve_engines(sock, settings)


if __name__ == "__main__":
    main()
