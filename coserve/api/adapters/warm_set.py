"""The adapters that a new engine reads before any request needs them: pinned ones, and those that requests used
most."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import suppress

from coserve.api.node import Node
from coserve.core.cancellation import keep_task
from coserve.core.errors import EngineUnavailable, StorageError
from coserve.core.link.engine import PrefetchAdapter
from coserve.core.types import AdapterRef
from coserve.state.registry.records import AdapterRecord
from coserve.state.registry.registry import Registry

log = logging.getLogger(__name__)

FLUSH = 20.0
"""Seconds from a use until it is counted in the registry, together with later ones."""
MOST = 256
"""Most adapters of the warm set, pinned ones not counted."""
SHARE = 0.5
"""Largest fraction of the host memory for idle adapters that the warm set may fill."""


class WarmSet:
    """Counts uses of adapters, and tells a new engine which ones to read."""

    def __init__(self, node: Node) -> None:
        self._registry, self._engine = node.registry, node.engine
        self._uses = Counter[AdapterRef]()
        self._flush: asyncio.TimerHandle | None = None
        self._tasks = set[asyncio.Task[None]]()

    def used(self, ref: AdapterRef) -> None:
        """Count one more request."""
        self._uses[ref] += 1
        if self._flush is None:
            loop = asyncio.get_running_loop()
            self._flush = loop.call_later(FLUSH, lambda: keep_task(self._count(), self._tasks))

    def read(self) -> None:
        """Let the engine, which has just started, read the warm set."""
        keep_task(self._read(), self._tasks)

    async def close(self) -> None:
        """Count the uses that are not counted yet."""
        for task in [*self._tasks]:
            await task
        await self._count()

    async def _count(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
        self._flush, uses = None, self._uses
        self._uses = Counter()
        if uses:
            with suppress(StorageError):  # the counts only decide what later engines read first
                await self._registry(lambda registry: registry.count_uses(uses))

    async def _read(self) -> None:
        await self._count()
        ready = self._engine.ready
        if ready is None:
            return
        fingerprint, room = ready.spec.fingerprint, SHARE * ready.host_adapter_limit

        def chosen(registry: Registry) -> list[tuple[AdapterRecord, bool]]:
            with registry.snapshot():
                pins = registry.pins()
                wanted = [*pins, *(ref for ref in registry.most_used(MOST) if ref not in pins)]
                found = [(registry.find_version(ref), ref in pins) for ref in wanted]
            return [(record, pinned) for record, pinned in found if record is not None]

        try:
            found = await self._registry.read(chosen)
            for record, pinned in found:
                if record.base_fingerprint != fingerprint:
                    continue
                if pinned or record.bytes <= room:
                    room -= record.bytes
                    self._engine.send(
                        PrefetchAdapter(ref=record.ref, digests=record.digests, pinned=True if pinned else None)
                    )
        except (StorageError, EngineUnavailable) as error:
            log.warning("the adapters that were used most are not read ahead: %s", error)
