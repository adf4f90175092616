"""How far a rank is with the commands of rank 0, and whether it still makes progress."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from coserve.core.ranks import FIRST, HEARTBEAT, LEAST, START, Heartbeat
from coserve.engine.ranks.loading import compiles, loaded

MARGIN = 4
"""A command is expected to pause this many times as long as the longest earlier one of its kind: sizes differ."""


@dataclass(frozen=True)
class _Running:
    """A command that is being executed."""

    number: int
    kind: str
    thread: int
    """`threading.get_ident` of the thread that executes it."""


class Progress:
    """Changed by the thread that executes commands, read by the one that sends heartbeats.

    Time is counted in heartbeats: while the process itself was stopped, no command was late.
    """

    def __init__(self) -> None:
        self._done = 0
        self._running: _Running | None = None
        self._device: str | None = None
        """None while the rank starts."""
        self._known = set[str]()
        """Kinds of which a command has ended since the rank was ready."""
        self._collectives: Callable[[], int] = lambda: 0
        self._kernels: Callable[[], int] = lambda: 0
        self._compiles: Callable[[], bool] = lambda: False
        self._signs = self._loaded = 0
        self._watched: _Running | None = None
        self._quiet = 0
        """Heartbeats without progress of the command that was `_watched`."""
        self._longest = Counter[str]()
        """By kind: the longest such pause that ended."""

    @contextmanager
    def command(self, number: int, kind: str) -> Iterator[None]:
        """Around the execution of a command. `kind`: commands of one kind are expected to take about equally long."""
        running = _Running(number, kind, threading.get_ident())
        self._running, self._done = running, max(self._done, number - 1)  # commands are executed in order
        try:
            yield
        finally:
            if self._device is not None:
                self._known.add(kind)
            self._running, self._done = None, number

    def watch_collectives(self, begun: Callable[[], int]) -> None:
        """How many have begun: a command makes progress while the number grows."""
        self._collectives = begun

    def watch_kernels(self, loaded: Callable[[], int]) -> None:
        """How many were loaded: as `watch_collectives`."""
        self._kernels = loaded

    def watch_compiler(self, compiles: Callable[[], bool]) -> None:
        """Whether layers are being compiled, which is progress however long it takes."""
        self._compiles = compiles

    def ready(self, device: str) -> None:
        """The rank has started; `device`: cpu or cuda."""
        self._device = device

    def heartbeat(self) -> Heartbeat:
        """Every `HEARTBEAT` seconds."""
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
        """Whether it compiles or loads code. The stack and the disk are looked at in the first command of a kind
        alone."""
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
