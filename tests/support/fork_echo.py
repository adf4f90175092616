"""A fork server whose workers import nothing: each reports its parts with its pid, that of a process that it forks for the part `fork`, and dies of the part `die`. The
reports of `long` and `unreadable` are no lines that a client reads."""

from __future__ import annotations

import os
import signal
import socket
import sys

import msgspec

from coserve.engine.warming.worker_process import serve_forks
from coserve.processes import adopt_orphans, obey_parent
from coserve.warmup.messages import DoPart, PartReport, WarmUpTask

ODD = {"long": b"x" * 100_000 + b"\n", "unreadable": b"a warning\n"}


def echo(sock: socket.socket) -> None:
    with sock.makefile("rwb") as lines:
        task = msgspec.json.decode(lines.readline(), type=WarmUpTask)
        for line in lines:
            name = msgspec.json.decode(line, type=DoPart).name
            if name == "die":
                os._exit(3)
            pid = worker = os.getpid()
            if name == "fork" and (pid := os.fork()) == 0:
                obey_parent(worker)
                signal.pause()
            if name == "die with the server":
                os.kill(os.getppid(), 9)
            if name in ODD:
                lines.write(ODD[name])
                lines.flush()
                continue
            lines.write(msgspec.json.encode(PartReport(1, 1, reason=f"{task.shape} {name} {pid}")) + b"\n")
            lines.flush()


if __name__ == "__main__":
    obey_parent()
    adopt_orphans()
    with socket.socket(fileno=int(sys.argv[1])) as control:
        serve_forks(control, echo, anew="ECHO_ANEW" in os.environ)
