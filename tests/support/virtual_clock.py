"""An event loop whose time is a number: sleeping costs nothing, and the same program runs the same way every time.

Only the selector differs from asyncio's own loop: where the real one would sleep for a while, this one adds the while
to the clock. Nothing from outside can wake the loop (no sockets, no threads, no signals), so a program that waits for
nothing that can happen is found out at once (`Deadlock`), as is one that spins without letting time pass (`Livelock`).
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

SPIN_LIMIT = 100_000


class Deadlock(RuntimeError):
    """Everything waits and no timer is set."""


class Livelock(RuntimeError):
    """The loop goes round without time passing."""


class _VirtualSelector(selectors.BaseSelector):
    """Notes the loop's own wake-up pipe (a file descriptor) and never reads it; `select` moves the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._spins = 0
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        self._keys[fileobj] = selectors.SelectorKey(fileobj, fileobj, events, data)
        return self._keys[fileobj]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock(f"at {self.now} s: everything waits and no timer is set")
        self._spins = 0 if timeout > 0 else self._spins + 1
        if self._spins > SPIN_LIMIT:
            self._spins = 0  # once found out, the loop may be closed
            raise Livelock(f"at {self.now} s: {SPIN_LIMIT} turns without time passing")
        self.now += max(0.0, timeout)
        return []


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and moves only when everything waits. Work for a thread is done by the loop itself, once
    `thread_seconds()` have passed."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        self.thread_seconds: Callable[[], float] = lambda: 0.0
        super().__init__(self._virtual)

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        async def work() -> Any:
            await asyncio.sleep(self.thread_seconds())
            return func(*args)

        return self.create_task(work())

    def time(self) -> float:
        return self._virtual.now

    def block(self, seconds: float) -> None:
        """So much time passes in the code that runs, and nothing else happens meanwhile."""
        self._virtual.now += seconds


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)
