"""A worker of a warm-up that imports nothing: each report has its pid. It dies of the part `die`, and writes what is no
report for `odd`."""

from __future__ import annotations

import os
import socket
import sys

import msgspec

from coserve.core.processes import obey_parent
from coserve.engine.warmup.messages import PartReport, WarmUpTask


def main() -> None:
    obey_parent()
    with socket.socket(fileno=int(sys.argv[1])) as sock, sock.makefile("rwb") as lines:
        task = msgspec.json.decode(lines.readline(), type=WarmUpTask)
        for line in lines:
            name = msgspec.json.decode(line, type=str)
            if name == "die":
                os._exit(3)
            report = PartReport(1, 1, reason=f"{task.shape} {name} {os.getpid()} {os.environ.get('ECHO')}")
            lines.write(b"a warning\n" if name == "odd" else msgspec.json.encode(report) + b"\n")
            lines.flush()


if __name__ == "__main__":
    main()
