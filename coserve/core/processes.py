"""Child processes of the daemon. They get none of its secrets, end with their parent, and ignore stop signals, which
are meant for the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import re
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
"""Environment variable with the pid of the process that started a child."""
CPU_QUOTA, MEMORY_LIMIT = Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/memory.max")


def child_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for child processes: this process's without the daemon's secrets."""
    kept = {name: value for name, value in environ.items() if name.upper() != "COSERVE_API_KEY"}
    return kept | {PARENT: str(os.getpid())}


async def start_child(
    module: str,
    end: socket.socket,
    *arguments: str,
    stdin: bytes | None = None,
    others: Sequence[socket.socket | IO[bytes]] = (),
    environment: Mapping[str, str] | None = None,
) -> asyncio.subprocess.Process:
    """Run `python -m MODULE FD ARGUMENTS…`, where FD is `end` of a socket pair. `MODULE` must call `obey_parent` first.
    The child also inherits `others`. `stdin`: its standard input; None: nothing. `environment`: additional variables.

    Stop signals are blocked until then: Ctrl-C reaches the whole process group, including an interpreter that just
    starts.
    """
    with _stop_signals_blocked():
        process = await asyncio.create_subprocess_exec(
            *_command(module, end, *arguments),
            stdin=asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE,
            pass_fds=tuple(sock.fileno() for sock in (end, *others)),
            env=child_environment() | dict(environment or {}),
        )
    if stdin is not None and process.stdin is not None:
        process.stdin.write(stdin)
        process.stdin.close()
    return process


def spawn_child(module: str, end: socket.socket, *others: int) -> subprocess.Popen[bytes]:
    """Start a child as `start_child` does, without an event loop. `others`: file descriptors that it also inherits."""
    with _stop_signals_blocked():
        return subprocess.Popen(  # noqa: S603 - our own module
            _command(module, end), stdin=subprocess.DEVNULL, pass_fds=(end.fileno(), *others), env=child_environment()
        )


def signal_child(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Send a signal as `process.send_signal` does, but without its poll (Python 3.11). The poll would take the exit
    status of a child that has just died away from asyncio, which would then report status 255 and warn of an unknown
    child."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, as by SIGSTOP. False if it does not exist, and on systems other than
    Linux."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def _command(module: str, end: socket.socket, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, str(end.fileno()), *arguments]


@contextlib.contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Block stop signals in processes that are started inside the block."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def same_bits_in_any_batch() -> None:
    """Let MKL give a row of a product the same bits whatever the other rows are, in this process; before its first
    product. Otherwise that holds for some shapes only, and for fewer on processors without AVX-512."""
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def usable_cores(quota: Path = CPU_QUOTA) -> int:
    """Return the CPU cores that this process may use: its CPU affinity, reduced to a container's `quota`; at least
    one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _quota(quota, cores)))


def _quota(path: Path, cores: int) -> int:
    """Return the whole cores of a cgroup's CPU quota (its file says "MICROSECONDS PERIOD"), or `cores` without a
    quota."""
    try:
        quota, period = path.read_text().split()
        return int(quota) // int(period)
    except (OSError, ValueError):  # no such file, or "max"
        return cores


def usable_memory(limit: Path = MEMORY_LIMIT) -> int:
    """Return the machine's memory in bytes, or a container's `limit` if lower."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int(limit.read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return machine


def free_memory() -> int:
    """Return the memory in bytes that the machine can give without swapping, at most `usable_memory`."""
    found = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return usable_memory() if found is None else min(int(found[1]) << 10, usable_memory())


def allow_more_files() -> int:
    """Raise this process's limit of file descriptors (sockets included) to its hard limit. Return the new limit,
    `RLIM_INFINITY` if there is none."""
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
    """Cap this process's limit of a resource (`resource.RLIMIT_*`) at `most` inside the block."""
    soft, hard = resource.getrlimit(kind)
    known = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(kind, (min([most, *known]), hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def obey_parent(parent: int | None = None) -> None:
    """End this process when its parent ends, or now if it has ended, and ignore stop signals, since the parent stops
    it. `parent`: pid of the process that forked this one; None: the pid is in the environment set by `start_child` or
    `spawn_child`."""
    if sys.platform == "linux":  # a kill -9 of the parent must not leave a second writer in the data folder
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != (int(os.environ[PARENT]) if parent is None else parent):  # it ended before the line above
        os._exit(1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def how_ended(status: int) -> str:
    """Return an exit status in words."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}"
