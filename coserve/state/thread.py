"""The registry for the event loop: one thread owns the connection, calls queue up for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from coserve.state.registry import Registry

T = TypeVar("T")


class RegistryThread:
    """`await thread(lambda registry: registry.job(id))`: calls run one at a time, in order, off the event loop.

    A call that was begun runs to its end even if its caller is cancelled. The registry opens at the first call, which
    raises what `Registry` raises.
    """

    def __init__(self, registry_factory: Callable[[], Registry]) -> None:
        self._factory = registry_factory
        self._registry: Registry | None = None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="registry")

    async def __call__(self, fn: Callable[[Registry], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._call, fn)

    def _call(self, fn: Callable[[Registry], T]) -> T:
        if self._registry is None:
            self._registry = self._factory()
        return fn(self._registry)

    def _close(self) -> None:
        if self._registry is not None:
            self._registry.close()

    async def close(self) -> None:
        """Finish what was asked for, close the file, end the thread. A second call does nothing."""
        try:
            closed = self._executor.submit(self._close)
        except RuntimeError:  # it was shut down before
            return
        self._executor.shutdown(wait=False)
        await asyncio.wrap_future(closed)
