"""Reads and checks an adapter's files: small JSON in a thread, large JSON in a helper process.

Decoding JSON holds the GIL, so a thread would block the event loop.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from coserve.admission.pool import check_can_be_served
from coserve.config import Config
from coserve.core.errors import CoserveError, StorageError
from coserve.core.gpu_memory import PoolShape
from coserve.core.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from coserve.core.types import AdapterRef, BaseSpec, LoraSettings
from coserve.data.offload.pool import HelperPool
from coserve.data.offload.protocol import TaskContext
from coserve.lora.files.peft import inspect_adapter
from coserve.lora.files.record import record_adapter
from coserve.lora.files.tensorfile import open_regular
from coserve.state.registry.records import AdapterRecord

MAX_THREAD_BYTES = 256 << 10
"""Most bytes of JSON (config plus the weights file's header) that a thread reads."""


class Inspection:
    """Checks adapters against the base, off the event loop. Raises what `inspect_adapter` raises, and `HelperLost`."""

    def __init__(self, helpers: HelperPool) -> None:
        self._helpers = helpers

    async def settings(self, folder: Path, base: BaseSpec) -> LoraSettings:
        """Return the settings of a valid adapter."""
        if await asyncio.to_thread(_json_bytes, folder) <= MAX_THREAD_BYTES:
            return (await asyncio.to_thread(inspect_adapter, folder, base)).settings
        return await self._helpers.run(inspect, str(folder), base)

    async def record(
        self, folder: Path, ref: AdapterRef, base: BaseSpec, *, source: str, created_at: float
    ) -> AdapterRecord:
        """Return the record of a valid adapter: see `record_adapter`."""
        if await asyncio.to_thread(_json_bytes, folder) <= MAX_THREAD_BYTES:
            return await asyncio.to_thread(record_adapter, folder, ref, base, source=source, created_at=created_at)
        return await self._helpers.run(record, str(folder), ref, base, source, created_at)


def inspect(context: TaskContext, folder: str, base: BaseSpec) -> LoraSettings:
    """Helper task of `Inspection.settings`."""
    return inspect_adapter(Path(folder), base, context.progress).settings


def record(
    context: TaskContext, folder: str, ref: AdapterRef, base: BaseSpec, source: str, created_at: float
) -> AdapterRecord:
    """Helper task of `Inspection.record`."""
    return record_adapter(Path(folder), ref, base, source=source, created_at=created_at, progress=context.progress)


async def refuse_too_large(
    adapter: str, settings: LoraSettings, base: BaseSpec, pool: PoolShape, config: Config, *, field: str | None
) -> None:
    """Run `check_can_be_served` off the event loop: settings may have a pattern for each of hundreds of sites."""
    await asyncio.to_thread(
        check_can_be_served,
        adapter,
        settings,
        base,
        pool,
        ranks=config.tp,
        fully_sharded=config.lora_sharding == "slora",
        field=field,
    )


def _json_bytes(folder: Path) -> int:
    """Return how many bytes of JSON the files claim to hold; 0 for invalid files, whose reader reports the fault.

    Raises `StorageError` subclasses.
    """
    try:
        with (
            os.fdopen(open_regular(folder, ADAPTER_CONFIG), "rb") as config,
            os.fdopen(open_regular(folder, ADAPTER_WEIGHTS), "rb") as file,
        ):
            return os.fstat(config.fileno()).st_size + int.from_bytes(file.read(8), "little")
    except StorageError:
        raise
    except (CoserveError, OSError):
        return 0
