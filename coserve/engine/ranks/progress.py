"""A rank's progress through the commands of rank 0, detection of a rank that hangs, and this process's own rank,
sockets and reports to the daemon. Available before torch is imported."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from coserve.core.link.channel import Channel
from coserve.core.link.link import PeerLost
from coserve.core.ranks import FIRST, HEARTBEAT, LEAST, START, Heartbeat, RankPlace, RankReady, RankReport

COMPILERS = ("triton.compiler", "importlib")
"""Packages on the stack of a thread that compiles a Triton kernel, loads it from disk, or imports a module."""
IO = Path("/proc/self/io")

MARGIN = 4
"""A command counts as late once its pause is this many times the longest earlier one of its kind: commands of a kind
differ in size."""


@dataclass(frozen=True)
class _Running:
    """A command being executed."""

    kind: str
    thread: int
    """`threading.get_ident` of the executing thread."""


class Progress:
    """Progress of a rank, written by the thread that executes commands, read by the heartbeat thread.

    Time is counted in heartbeats, so that a stopped process does not make commands late.
    """

    def __init__(self) -> None:
        self._done = 0
        self._running: _Running | None = None
        self._device: str | None = None
        """cpu or cuda; None while the rank starts."""
        self._known = set[str]()
        """Kinds of commands that have ended once since the rank was ready."""
        self._collectives: Callable[[], int] = lambda: 0
        self._kernels: Callable[[], int] = lambda: 0
        self._compiles: Callable[[], bool] = lambda: False
        self._signs = self._loaded = 0
        self._watched: _Running | None = None
        self._quiet = 0
        """Heartbeats without progress in the watched command."""
        self._longest = Counter[str]()
        """Longest pause without progress that ended, in heartbeats, by kind."""

    @contextmanager
    def command(self, number: int, kind: str) -> Iterator[None]:
        """Context for the execution of a command. `kind`: commands of one kind are expected to take about equally
        long."""
        running = _Running(kind, threading.get_ident())
        self._running, self._done = running, max(self._done, number - 1)  # commands are executed in order
        try:
            yield
        finally:
            if self._device is not None:
                self._known.add(kind)
            self._running, self._done = None, number

    def watch_collectives(self, begun: Callable[[], int]) -> None:
        """Set the counter of collectives begun; while it grows, a command makes progress."""
        self._collectives = begun

    def watch_kernels(self, loaded: Callable[[], int]) -> None:
        """Set the counter of loaded kernels; while it grows, a command makes progress."""
        self._kernels = loaded

    def watch_compiler(self, compiles: Callable[[], bool]) -> None:
        """Set the check whether layers are being compiled, which counts as progress however long it takes."""
        self._compiles = compiles

    def ready(self, device: str) -> None:
        """Mark the rank as started; `device`: cpu or cuda."""
        self._device = device

    def heartbeat(self) -> Heartbeat:
        """Return the next heartbeat. Called every `HEARTBEAT` seconds."""
        running, begun = self._running, self._collectives()
        signs, loads = begun + self._kernels(), self._loads(running)
        if running is not None and running is self._watched and signs == self._signs and not loads:
            self._quiet += 1
        else:
            if self._watched is not None and self._device is not None:
                self._longest[self._watched.kind] = max(self._longest[self._watched.kind], self._quiet)
            self._quiet = 0
        self._watched, self._signs = running, signs
        late = 0.0 if running is None else max(0.0, self._quiet * HEARTBEAT - self._expected(running.kind))
        return Heartbeat(self._done, begun, late, loads)

    def _loads(self, running: _Running | None) -> bool:
        """Whether the command compiles or loads code. Stack and disk are checked only in the first command of a
        kind."""
        if self._compiles():
            return True
        if running is None or running.kind in self._known:
            return False
        before, self._loaded = self._loaded, loaded()
        return compiles(running.thread) or (running is self._watched and self._loaded != before)

    def _expected(self, kind: str) -> float:
        """Seconds that a command of this kind may pause."""
        if self._device is None:
            return START
        if kind not in self._known:
            return FIRST[self._device]
        return max(LEAST[self._device], MARGIN * self._longest[kind] * HEARTBEAT)


def compiles(thread: int | None) -> bool:
    """Return whether the given thread compiles or loads a Triton kernel, or imports a module. torch.compile is not
    detected here, as its frames are also on the stack while compiled code runs: see `compilations.watch_layers`."""
    frame = None if thread is None else sys._current_frames().get(thread)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(COMPILERS):
            return True
        frame = frame.f_back
    return False


def loaded(io: Path = IO) -> int:
    """A counter that grows while modules are imported or files, such as libraries, are read from disk."""
    try:
        counters = dict(line.split(": ", 1) for line in io.read_text().splitlines())
        read = int(counters["read_bytes"])
    except (OSError, ValueError, KeyError):  # not Linux
        read = 0
    return read + len(sys.modules)


class Monitor:
    """Sends heartbeats from its own thread until the process ends."""

    def __init__(self, sock: socket.socket) -> None:
        self.progress = Progress()
        self._reports = Channel[RankReport, None](sock, msgspec.msgpack.Decoder(None))
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def report(self, report: RankReport) -> None:
        """Send a report; on any thread. Ignored if the daemon is gone, because this process then ends too."""
        with contextlib.suppress(PeerLost):
            self._reports.send(report)

    def ready(self, device: str) -> None:
        """Report that the rank has started; `device`: cpu or cuda."""
        self.progress.ready(device)
        self.report(RankReady())

    def _beat(self) -> None:
        while True:
            self.report(self.progress.heartbeat())
            time.sleep(HEARTBEAT)


class OwnRank:
    """This process's rank. Heartbeats begin at construction."""

    def __init__(self, place: RankPlace) -> None:
        self.place, self.monitor = place, Monitor(socket.socket(fileno=place.monitor))
        self.commands = [socket.socket(fileno=fd) for fd in place.commands]
        """On rank 0, one socket for each follower; on a follower, a single one, to rank 0."""
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # all ranks are on one host: listen only there
            os.environ[name] = "lo"


def own_rank(arguments: list[str]) -> OwnRank | None:
    """Parse the rank from a process's arguments, after its first socket's file descriptor; None without tensor
    parallelism."""
    return OwnRank(msgspec.json.decode(arguments[1], type=RankPlace)) if len(arguments) > 1 else None
