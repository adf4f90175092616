"""The LoRA servers of an engine, which are started again when they are lost, and the adapters that they hold."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coserve.core.errors import LoraServerLost, LoraServersMissing, StartupError
from coserve.core.health import LoraServerInfo
from coserve.core.link.lora_servers import socket_path
from coserve.core.logs import log_event
from coserve.core.types import AdapterDigests, AdapterRef
from coserve.engine.lora_server.messages import SLOTS, AnyToServer, DropPairs, EnginesConnected, LoadPairs, PairsLoaded
from coserve.engine.lora_server.recorded_step import RecordedStep
from coserve.engine.lora_server.remote_step import RemoteStep, ServerConnection, step_slots
from coserve.engine.lora_server.running import Answered, RunningServers, Told
from coserve.kernels.lora.segments import Segments
from coserve.lora.store.interfaces import CopyMirror

log = logging.getLogger(__name__)

PAUSES = 1.0, 30.0
"""Seconds to wait before lost servers are started again: at first, doubled after each failure, and at most."""


@dataclass
class _Held:
    """An adapter that the servers hold, or were asked to load."""

    slot: int
    digests: AdapterDigests | None
    waiting: set[int] = field(default_factory=set)
    """Servers that have not answered."""
    bytes: dict[int, int] = field(default_factory=dict)
    """Bytes of its pairs, by server."""
    refused: str = ""

    @property
    def ready(self) -> bool:
        return not (self.waiting or self.refused) and any(self.bytes.values())


class LoraServers(CopyMirror):
    """Implements `RemoteExperts`, and `RemotePairs` and `CopyMirror` of the store: the servers drop an adapter with the
    engine's host copy. A thread of its own starts the servers, and another sends them messages on adapters; all methods
    may be called on any thread."""

    def __init__(
        self,
        count: int,
        start: Callable[[int, Answered], RunningServers],
        patience: float,
        ended: Callable[[], None] = lambda: None,
        at: Path | None = None,
    ) -> None:
        """`start`: starts `count` servers; its first argument is the number of the start, from 1. `patience`: seconds
        that `load` waits for servers once the engine has read an adapter. `ended` is called, on the thread of `start`,
        when none will be started any more and the last ones have ended. `at`: folder of servers that other engines use,
        too."""
        self._at, self._count, self._start, self._patience = at, count, start, patience
        self._changed, self._starts, self._losses = threading.Condition(), 0, 0
        self._running: RunningServers | None = None
        self._connections: Sequence[ServerConnection] = ()
        """Those of the latest start; empty before the first."""
        self._held: dict[AdapterRef, _Held] = {}
        self._loads: dict[int, _Held] = {}
        """Loads of this start that are not answered, by number; also of adapters that were dropped meanwhile."""
        self._unsent = list[AnyToServer]()
        """Messages for each server of this start. `_send` sends them, as an event loop must not wait for a server that
        reads nothing."""
        self._answers = Counter[int]()
        """Answers to loads so far, by server."""
        self._numbers, self._free = itertools.count(1), list(range(SLOTS))
        self._failure: Exception | None = None
        self._refused = ""
        """Why the servers did not start at the last attempt."""
        self._tell: Callable[[], None] = lambda: None
        self._ended = threading.Event()
        self._keeper = threading.Thread(target=self._keep, args=(ended,), name="lora-servers", daemon=True)
        self._keeper.start()
        threading.Thread(target=self._send, name="lora-sends", daemon=True).start()

    def notify(self, changed: Callable[[], None]) -> None:
        """Call `changed`, on any thread, when servers were lost or have started, and when they have answered a load."""
        self._tell = changed

    # ---- processes

    def wait(self) -> None:
        """Wait until the servers have started for the first time. Raises `LoraServersMissing` if they do not."""
        with self._changed:
            self._changed.wait_for(lambda: self._connections or self._failure is not None)
        if isinstance(self._failure, StartupError):
            raise self._failure
        if self._failure is not None:
            raise LoraServersMissing(f"the LoRA servers did not start: {self._failure}")

    def close(self) -> None:
        """End the servers, and wait for their ends; servers that are still starting end by themselves."""
        with self._changed:
            self._ended.set()
            self._changed.notify_all()
        if (running := self._running) is not None:
            running.lose("the engine stops")
            self._keeper.join()

    def _keep(self, ended: Callable[[], None]) -> None:
        """Keep the servers running; on a thread."""
        try:
            self._start_again()
        finally:
            ended()

    def _start_again(self) -> None:
        """Start the servers, and start them again whenever they are lost."""
        pause, longest = PAUSES
        while not self._ended.is_set():
            self._starts += 1
            try:
                running = self._start(self._starts, self._answered)
            except Exception as error:
                known = isinstance(error, ConnectionError | StartupError)
                self._refused = str(error) or type(error).__name__
                log.warning("the LoRA servers did not start: %s", self._refused, exc_info=None if known else error)
                if self._starts == 1:
                    with self._changed:
                        self._failure = error
                        self._changed.notify_all()
                    return
            else:
                pause, self._refused = PAUSES[0], ""
                self._publish(running)
                if not self._ended.is_set():
                    running.wait()
                self._forget()
                running.end()
                if not self._ended.is_set():
                    log.warning("%s: all LoRA servers are started or connected again", running.why)
            self._ended.wait(pause)
            pause = min(2 * pause, longest)

    def _publish(self, running: RunningServers) -> None:
        """Use these servers from now on; they get all adapters."""
        with self._changed:
            self._running, self._connections = running, running.connections
            for ref in self._held:
                self._ask(ref)
            self._changed.notify_all()
        self._tell()
        log_event(log, "LoRA servers ready", servers=self._count, start=self._starts, adapters=len(self._held))

    def _forget(self) -> None:
        """Forget what lost servers held and were loading."""
        with self._changed:
            self._running, self._losses = None, self._losses + 1
            self._loads.clear()
            self._unsent.clear()
            for held in self._held.values():
                held.waiting, held.bytes = set(range(self._count)), {}
            self._changed.notify_all()
        self._tell()

    # ---- adapters

    def load(self, ref: AdapterRef, digests: AdapterDigests | None) -> Callable[[], None]:
        """Have the servers read an adapter's pairs, and return a function that waits until they have them or are lost,
        as those are that answer no load for too long: a slow disk is no reason to read every adapter again. Until they
        have them the engine computes the adapter itself."""
        with self._changed:
            answers = self._answers.copy()
            if ref not in self._held and self._free:
                self._held[ref] = _Held(self._free.pop(), digests, set(range(self._count)))
                if self._running is not None:
                    self._ask(ref)

        def answered() -> bool:
            held, running = self._held.get(ref), self._running
            return held is None or not held.waiting or running is None or running.lost

        def wait() -> None:
            with self._changed:
                before = self._running
                late = not self._changed.wait_for(answered, self._patience)
                if late and before is not None and before is self._running:
                    silent = [each for each in self._held[ref].waiting if self._answers[each] == answers[each]]
                    if silent:
                        before.lose(f"LoRA server {min(silent)} did not read an adapter in time")

        return wait

    def dropped(self, ref: AdapterRef) -> None:
        """Have the servers drop an adapter, if they have it. No later step may use it."""
        with self._changed:
            held = self._held.pop(ref, None)
            if held is None:
                return
            self._free.append(held.slot)
            if self._running is not None:
                self._unsent.append(DropPairs(slot=held.slot))
            self._changed.notify_all()

    def slot(self, ref: AdapterRef) -> int:
        """Return the slot in which all servers hold the adapter's pairs now; -1: they do not."""
        held, running = self._held.get(ref), self._running
        return held.slot if held is not None and held.ready and running is not None and not running.lost else -1

    @property
    def losses(self) -> int:
        with self._changed:
            return self._losses + (self._running is not None and self._running.lost)

    @property
    def troubles(self) -> tuple[str, ...]:
        """Notes on lost servers, on adapters that they could not take, and on how they are connected."""
        with self._changed:
            refused = [f"{ref}: {held.refused}" for ref, held in self._held.items() if held.refused]
        notes = [f"LoRA servers do not hold {len(refused)} adapters, such as {refused[0]}"] if refused else []
        if (running := self._running) is not None:
            notes += [running.note] if running.note else []
        else:
            how = "connected" if self._at is not None else "started"
            doing = f"the LoRA servers were lost and are being {how} again"
            why = f" ({self._refused})" if self._refused else ""
            notes.append(f"{doing}; until then the engine computes adapters of experts itself{why}")
        return tuple(notes)

    def states(self) -> tuple[LoraServerInfo, ...]:
        """The state of each server."""
        running = self._running
        up = running is not None and not running.lost
        with self._changed:
            return tuple(
                LoraServerInfo(
                    server=index,
                    state="ready" if up else "starting",
                    starts=self._starts,
                    adapters=sum(bool(held.bytes.get(index)) for held in self._held.values()),
                    bytes=sum(held.bytes.get(index, 0) for held in self._held.values()),
                    at="" if self._at is None else str(socket_path(self._at, index)),
                    engines=running.servers[index].engines if running is not None and up else 0,
                )
                for index in range(self._count)
            )

    def _send(self) -> None:
        """Send the messages as the servers take them; on a thread. A server that takes none for too long is lost."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsent or self._ended.is_set())
                if self._ended.is_set():
                    return
                running, messages = self._running, self._unsent[:]
                self._unsent.clear()
            if running is not None:
                for message, index in itertools.product(messages, range(self._count)):
                    running.send(index, message)

    def _ask(self, ref: AdapterRef) -> None:
        held, number = self._held[ref], next(self._numbers)
        held.waiting, held.bytes, held.refused = set(range(self._count)), {}, ""
        self._loads[number] = held
        self._unsent.append(LoadPairs(number=number, slot=held.slot, ref=ref, digests=held.digests))
        self._changed.notify_all()

    def _answered(self, index: int, message: Told) -> None:
        if isinstance(message, EnginesConnected):
            self._tell()
            return
        with self._changed:
            self._answers[index] += 1
            held = self._loads.get(message.number)
            if held is None:
                return
            if isinstance(message, PairsLoaded):
                held.bytes[index] = message.bytes
            else:
                held.refused = message.message
            held.waiting.discard(index)  # last, as `slot` reads without the lock
            if not held.waiting:
                del self._loads[message.number]
            self._changed.notify_all()
        self._tell()

    # ---- steps

    def step(self, segments: Segments, slots: Sequence[int]) -> RemoteStep | None:
        running = self._running
        if running is not None:
            return running.step(segments, slots)
        if step_slots(segments, slots, segments.tokens) is not None:
            raise LoraServerLost("the LoRA servers are started again")
        return None

    def recorded(self) -> RecordedStep | None:
        self.wait()
        if not all(connection.transport.recordable for connection in self._connections):
            return None
        return RecordedStep(self._connections, lambda: self._running)
