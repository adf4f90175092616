"""Child processes of the daemon: they get none of its secrets, end with their parent, and ignore stop signals, which
are meant for the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)

STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
PR_SET_PDEATHSIG = 1
PARENT = "_COSERVE_PARENT"
"""The variable with the pid of the process that started a child."""
CPU_QUOTA, MEMORY_LIMIT = Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/memory.max")


def child_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a child of this process: without the daemon's secrets, which its processes do not need."""
    kept = {name: value for name, value in environ.items() if name.upper() != "COSERVE_API_KEY"}
    return kept | {PARENT: str(os.getpid())}


async def start_child(
    module: str,
    end: socket.socket,
    *arguments: str,
    stdin: int,
    others: Sequence[socket.socket | IO[bytes]] = (),
    environment: Mapping[str, str] | None = None,
) -> asyncio.subprocess.Process:
    """Run `python -m MODULE FD ARGUMENTS…`, where FD is `end` of a socket pair; `MODULE` calls `obey_parent` first. It
    inherits the `others`, too. `environment`: variables besides those of this process.

    Stop signals are blocked until then: Ctrl-C reaches the whole process group, a new interpreter too.
    """
    with _stop_signals_blocked():
        return await asyncio.create_subprocess_exec(
            *_command(module, end, *arguments),
            stdin=stdin,
            pass_fds=tuple(sock.fileno() for sock in (end, *others)),
            env=child_environment() | dict(environment or {}),
        )


def spawn_child(module: str, end: socket.socket, stdin: bytes) -> subprocess.Popen[bytes]:
    """`start_child` without an event loop. `stdin`: the process's whole standard input."""
    with _stop_signals_blocked():
        process = subprocess.Popen(  # noqa: S603 - our own module
            _command(module, end), stdin=subprocess.PIPE, pass_fds=(end.fileno(),), env=child_environment()
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(stdin)
    return process


def signal_child(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """`process.send_signal`, which in Python 3.11 polls first: it would take the exit status of a child that has just
    died from asyncio, which then warns of an unknown child process and says that the status is 255."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP. False if there is none, or on another system than Linux."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def _command(module: str, end: socket.socket, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, str(end.fileno()), *arguments]


@contextlib.contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """A process that is started inside has stop signals blocked."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def usable_cores(quota: Path = CPU_QUOTA) -> int:
    """Processor cores that this process may use: those of its CPU affinity, fewer under a container's `quota`; at least
    one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _quota(quota, cores)))


def _quota(path: Path, cores: int) -> int:
    """Whole cores of a cgroup's CPU quota, whose file says "MICROSECONDS PERIOD"; `cores` without a quota."""
    try:
        quota, period = path.read_text().split()
        return int(quota) // int(period)
    except (OSError, ValueError):  # no such file, or "max"
        return cores


def usable_memory(limit: Path = MEMORY_LIMIT) -> int:
    """Bytes of the machine's memory, fewer under a container's `limit`."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int(limit.read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return machine


def allow_more_files() -> int:
    """Raise this process's limit of file descriptors, sockets among them, to its hard limit; returns what it is then,
    `RLIM_INFINITY` without one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:  # some systems take no unlimited value
            log.warning("the limit of file descriptors stays at %d: %s", soft, error)
            return soft
    return hard


@contextlib.contextmanager
def limited(kind: int, most: int) -> Iterator[None]:
    """This process's limit of a resource (`resource.RLIMIT_*`) is at most `most` while the body runs."""
    soft, hard = resource.getrlimit(kind)
    known = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(kind, (min([most, *known]), hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def obey_parent(parent: int | None = None) -> None:
    """End when the parent ends, also if it has ended already, and ignore stop signals: the parent stops this process.
    `parent`: the pid of the process that forked this one; None: it was started by `start_child` or `spawn_child`, and
    has their environment."""
    if sys.platform == "linux":  # a second writer must not be left in the data folder by a kill -9 of the parent
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != (int(os.environ[PARENT]) if parent is None else parent):  # it ended before the line above
        os._exit(1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
