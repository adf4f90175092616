"""The processes that the daemon starts: without its secrets, and deaf to signals that are meant for the daemon."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Mapping

STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
PR_SET_PDEATHSIG = 1


def child_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment without the daemon's secrets, which its processes do not need."""
    return {name: value for name, value in environ.items() if name.upper() != "COSERVE_API_KEY"}


async def start_child(module: str, end: socket.socket, *arguments: str, stdin: int) -> asyncio.subprocess.Process:
    """Run `python -m MODULE FD ARGUMENTS…`, where FD is `end` of a socket pair; `MODULE` calls `obey_parent` first.

    Stop signals are blocked until then: Ctrl-C reaches the whole process group, a new interpreter too.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # a new process inherits the mask
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            str(end.fileno()),
            *arguments,
            stdin=stdin,
            pass_fds=(end.fileno(),),
            env=child_environment(),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def obey_parent() -> None:
    """End with the parent, however it ends, and ignore stop signals: the parent says when to stop."""
    if sys.platform == "linux":  # a second writer must not be left in the data folder by a kill -9 of the parent
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
