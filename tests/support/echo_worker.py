"""A worker of a warm-up that imports nothing: each report has its pid. It dies of the part `die`, and writes what is no
report for `odd`."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress

import msgspec

from coserve.core.link.channel import Channel
from coserve.core.link.link import PeerLost
from coserve.core.processes import obey_parent
from coserve.engine.warmup.parts import PartReport, WarmUpTask


def main() -> None:
    obey_parent()
    sock = socket.socket(fileno=int(sys.argv[1]))
    channel = Channel[PartReport, WarmUpTask | str](sock, msgspec.msgpack.Decoder(WarmUpTask | str))
    with suppress(PeerLost):
        task = channel.receive()
        assert isinstance(task, WarmUpTask)
        while name := channel.receive():
            if name == "die":
                os._exit(3)
            if name == "odd":
                sock.sendall(b"a warning\n")
            channel.send(PartReport(1, 1, reason=f"{task.shape} {name} {os.getpid()} {os.environ.get('ECHO')}"))


if __name__ == "__main__":
    main()
