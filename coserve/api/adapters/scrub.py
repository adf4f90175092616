"""Compares adapters' files with their digests in the background, one adapter at a time; loading an adapter does not."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path

from coserve.api.node import Node
from coserve.core.errors import AdapterError, StorageError
from coserve.core.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from coserve.core.types import AdapterRef
from coserve.lora.files.packed_header import PACKED_FILE, is_sound
from coserve.lora.files.tensorfile import check_digest, digest_file
from coserve.state.registry.records import AdapterRecord
from coserve.state.registry.registry import Registry

log = logging.getLogger(__name__)

FIRST = 600.0
"""Seconds after the start at which the first round begins."""
BYTES_PER_SECOND = 8 << 20
"""Bytes of PEFT's files compared per second on average, packed files not counted: a rest follows each adapter."""
REST = 86_400.0
"""Seconds between two rounds."""


class Scrub:
    """Reads every adapter's files once a day. A damaged packed file is removed, and rebuilt by the next read; a damaged
    PEFT file is reported in `notes`."""

    def __init__(self, node: Node) -> None:
        self._registry, self._folder = node.registry, node.folder
        self._damaged = dict[AdapterRef, str]()
        self._task: asyncio.Task[None] | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Adapters whose files are damaged; for /health."""
        return tuple(f"adapter {ref}: {why}" for ref, why in self._damaged.items())

    def forget(self, ref: AdapterRef) -> None:
        """Drop the note about a version that was deleted."""
        self._damaged.pop(ref, None)

    def open(self) -> None:
        self._task = self._task or asyncio.create_task(self._run())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        await asyncio.sleep(FIRST)
        while True:
            try:
                await self.round()
            except StorageError as error:
                log.warning("the adapters' files are not all compared today: %s", error)
            await asyncio.sleep(REST)

    async def round(self, pace: float = 1.0) -> None:
        """Compare all adapters. `pace`: 0 takes no rests."""
        for ref in await self._registry.read(lambda registry: registry.adapter_refs()):
            record = await self._registry.read(partial(Registry.find_version, ref=ref))
            if record is None:  # deleted meanwhile
                continue
            found = await asyncio.to_thread(compare, record, self._folder.adapter(ref))
            self._damaged.pop(ref, None)
            if found is not None:
                self._damaged[ref] = found
                log.warning("adapter %s: %s", ref, found)
            await asyncio.sleep(pace * record.bytes / BYTES_PER_SECOND)


def compare(record: AdapterRecord, folder: Path) -> str | None:
    """Return what is wrong with a version's PEFT files; None: nothing. Removes its packed file if that is damaged."""
    try:
        if not is_sound(folder):
            log.warning("adapter %s: its packed file is damaged, and is made again", record.ref)
            (folder / PACKED_FILE).unlink(missing_ok=True)
        check_digest(digest_file(folder, ADAPTER_WEIGHTS), record.sha256, ADAPTER_WEIGHTS)
        if record.config_sha256:
            check_digest(digest_file(folder, ADAPTER_CONFIG), record.config_sha256, ADAPTER_CONFIG)
    except AdapterError as error:
        return error.message if folder.exists() else None  # else it was deleted meanwhile
    except (StorageError, OSError) as error:
        log.warning("the files of adapter %s cannot be compared now: %s", record.ref, error)
    return None
