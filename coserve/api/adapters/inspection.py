"""Reads and checks an adapter's files: small JSON in a thread, large JSON in a helper process.

Decoding JSON holds the GIL, so a thread would block the event loop.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec

from coserve.core.errors import CoserveError, StorageError
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


class InspectArguments(msgspec.Struct, frozen=True):
    folder: str
    base: BaseSpec


class RecordArguments(msgspec.Struct, frozen=True):
    """Arguments of `record`. `created_at`: seconds since the epoch."""

    folder: str
    base: BaseSpec
    ref: AdapterRef
    source: str
    created_at: float


class Inspection:
    """Checks adapters against the base, off the event loop. Raises what `inspect_adapter` raises, and `HelperLost`."""

    def __init__(self, helpers: HelperPool) -> None:
        self._helpers = helpers

    async def settings(self, folder: Path, base: BaseSpec) -> LoraSettings:
        """Return the settings of a valid adapter."""
        if await asyncio.to_thread(_json_bytes, folder) <= MAX_THREAD_BYTES:
            return (await asyncio.to_thread(inspect_adapter, folder, base)).settings
        found = await self._helpers.run(inspect, InspectArguments(str(folder), base))
        return msgspec.msgpack.decode(found, type=LoraSettings)

    async def record(
        self, folder: Path, ref: AdapterRef, base: BaseSpec, *, source: str, created_at: float
    ) -> AdapterRecord:
        """Return the record of a valid adapter: see `record_adapter`."""
        if await asyncio.to_thread(_json_bytes, folder) <= MAX_THREAD_BYTES:
            return await asyncio.to_thread(record_adapter, folder, ref, base, source=source, created_at=created_at)
        found = await self._helpers.run(record, RecordArguments(str(folder), base, ref, source, created_at))
        return msgspec.msgpack.decode(found, type=AdapterRecord)


def inspect(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    """Helper task of `Inspection.settings`."""
    options = msgspec.msgpack.decode(arguments, type=InspectArguments)
    return msgspec.msgpack.encode(inspect_adapter(Path(options.folder), options.base, context.progress).settings)


def record(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    """Helper task of `Inspection.record`."""
    options = msgspec.msgpack.decode(arguments, type=RecordArguments)
    folder = Path(options.folder)
    return msgspec.msgpack.encode(
        record_adapter(
            folder,
            options.ref,
            options.base,
            source=options.source,
            created_at=options.created_at,
            progress=context.progress,
        )
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
