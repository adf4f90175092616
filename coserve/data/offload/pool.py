"""Helper processes for work that would hold the GIL: long texts, large JSON, corpora.

`tokenizers` and `msgspec` process a whole text or document in one native call that holds the GIL, so a thread would
block the event loop. A process does not, and it can be killed when its client leaves or when it is stuck.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from functools import cached_property
from typing import Concatenate, ParamSpec, TypeVar

import msgspec

from coserve.core.cancellation import keep_task, uncancelled
from coserve.core.errors import CoserveError, HelperLost, InvalidRequest
from coserve.core.link.channel import WorkerProcess
from coserve.core.link.link import PeerLost
from coserve.core.logs import LogSettings
from coserve.data.offload.protocol import Call, Reply, TaskContext, arguments_of, error_of, name_of, result_of
from coserve.data.pretrained.sandbox import TOO_LONG

P = ParamSpec("P")
T = TypeVar("T")
REPLIES = msgspec.msgpack.Decoder(Reply)
SILENCE = 120.0
"""Seconds without a heartbeat after which a process counts as stuck."""
HEARTBEATS = 120
"""Heartbeats that a working task sends within the `silence` of its call."""
MAX_MEMORY = 1 << 30
"""Bytes. A process that has used more is replaced after its task."""

ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
"""Environment that limits NumPy's linear algebra to one thread. Its threads spin while they wait for each other: 100
times slower on a machine that is busy serving."""


class NotBegun(Exception):
    """The process ended before it began the task: another process may run it."""


class HelperProcess(WorkerProcess[Call, Reply]):
    """One helper process. It handles one call at a time."""

    memory = 0
    _setup: bytes | None = None
    """The tokenizer's state, until it is sent."""

    @classmethod
    async def begin(cls, setup: bytes, log: LogSettings) -> HelperProcess:
        """Start a process. `setup`: the tokenizer's state."""
        process = await cls.start("coserve.data.offload.main", REPLIES, log.level, log.format, environment=ONE_THREAD)
        process._setup = setup
        return process

    async def call(self, task: str, arguments: bytes, silence: float) -> bytes:
        """Return the task's result. `silence`: seconds without a heartbeat after which the process counts as stuck.

        Raises what the task raised, `TimeoutError` for a stuck process, `PeerLost` for one that died during the task,
        `NotBegun` for one that died before it.
        """
        try:
            async with asyncio.timeout(silence):
                if self._setup is not None:
                    setup, self._setup = self._setup, None
                    await self._send("", setup, 0.0)
                await self._send(task, arguments, silence / HEARTBEATS)
            reply = await self.receive(silence)  # the first reply says that the task begins
        except PeerLost as error:
            raise NotBegun from error
        while reply.working:
            reply = await self.receive(silence)
        self.memory = reply.memory
        if reply.failure is not None:
            raise error_of(reply.failure)
        return reply.result

    async def _send(self, task: str, arguments: bytes, heartbeat: float) -> None:
        self.channel.send(Call(task, len(arguments), heartbeat))
        await self.channel.send_bytes(arguments)


class HelperPool:
    """A pool of at most `size` helper processes, started when there is work. `setup` gives the tokenizer's state.

    `silence`: seconds without a heartbeat after which a process counts as stuck. `max_memory`: bytes; a process that
    has used more is replaced after its task.
    """

    def __init__(
        self,
        setup: Callable[[], bytes],
        size: int,
        log: LogSettings | None = None,
        silence: float = SILENCE,
        max_memory: int = MAX_MEMORY,
    ) -> None:
        self._make_setup, self._log = setup, log or LogSettings()
        self.silence, self._max_memory = silence, max_memory
        self._turns = asyncio.Semaphore(size)
        self._idle: list[HelperProcess] = []
        self._ends: set[asyncio.Task[int]] = set()

    @cached_property
    def _setup(self) -> bytes:
        return self._make_setup()

    async def run(self, task: Callable[Concatenate[TaskContext, P], T], *given: P.args, **options: P.kwargs) -> T:
        """Run `task` in a process and return its result. Cancelling the call kills the process. If a process was killed
        before it began the task, another one runs it.

        Once this raises, the task has ended. Raises what the task raises, `HelperLost`, and `InvalidRequest` if the
        task sent no heartbeat for `silence` seconds, or a chat template took too much processor time.
        """
        name, arguments = name_of(task), msgspec.msgpack.encode(arguments_of(task)(*given, **options))
        result: T = msgspec.msgpack.decode(await self._run(name, arguments), type=result_of(task))
        return result

    async def _run(self, task: str, arguments: bytes) -> bytes:
        async with self._turns:
            while True:
                helper = self._idle_helper()
                new = helper is None
                try:
                    return await self._call(helper or await self._start(), task, arguments)
                except TimeoutError:
                    raise InvalidRequest(f"expected input that is read within {self.silence:.0f} s") from None
                except PeerLost:
                    raise HelperLost("the process that read this request ended before it was done; try again") from None
                except NotBegun:
                    if new:
                        raise HelperLost("the process that was to read this request was killed; try again") from None

    async def _call(self, helper: HelperProcess, task: str, arguments: bytes) -> bytes:
        """Return `HelperProcess.call`'s result; afterwards the process is idle or has ended."""
        done = False
        try:
            result = await helper.call(task, arguments, self.silence)
            done = True
            return result
        except CoserveError:  # raised by the task
            done = True
            raise
        except PeerLost:
            if await uncancelled(self._end(helper)) == -signal.SIGXCPU:
                raise InvalidRequest(TOO_LONG, field="messages") from None
            raise
        finally:
            if done and helper.memory <= self._max_memory:
                self._idle.append(helper)
            else:
                await uncancelled(self._end(helper))

    async def _start(self) -> HelperProcess:
        return await HelperProcess.begin(await asyncio.to_thread(lambda: self._setup), self._log)

    def _idle_helper(self) -> HelperProcess | None:
        """Return an idle process that is still alive, if any."""
        while self._idle:
            helper = self._idle.pop()
            if helper.alive:
                return helper
            self._end(helper)
        return None

    def _end(self, helper: HelperProcess) -> asyncio.Task[int]:
        return keep_task(helper.end(), self._ends)

    async def close(self) -> None:
        """End all processes. No call may be running."""
        while self._idle:
            self._end(self._idle.pop())
        await asyncio.gather(*self._ends)
