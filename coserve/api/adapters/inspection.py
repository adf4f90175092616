"""Reads and checks an adapter's files: small headers in a thread, large ones in a helper process.

Decoding JSON keeps the interpreter's lock, so a thread would stop the event loop.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec

from coserve.adapters.peft import inspect_adapter
from coserve.adapters.record import record_adapter
from coserve.adapters.tensorfile import open_regular
from coserve.errors import CoserveError, StorageError
from coserve.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from coserve.offload.pool import HelperPool
from coserve.offload.protocol import TaskContext
from coserve.state.records import AdapterRecord
from coserve.types import AdapterRef, BaseSpec, LoraSettings

IN_A_THREAD = 256 << 10
"""Bytes of JSON, of the config and the weights' header together, up to which a thread reads an adapter."""


class Inspect(msgspec.Struct, frozen=True):
    folder: str
    base: BaseSpec


class Record(msgspec.Struct, frozen=True):
    """`created_at`: seconds since the epoch."""

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
        """The settings of an adapter that is sound."""
        if await asyncio.to_thread(_json_bytes, folder) <= IN_A_THREAD:
            return (await asyncio.to_thread(inspect_adapter, folder, base)).settings
        found = await self._helpers.run(inspect, Inspect(str(folder), base))
        return msgspec.msgpack.decode(found, type=LoraSettings)

    async def record(
        self, folder: Path, ref: AdapterRef, base: BaseSpec, *, source: str, created_at: float
    ) -> AdapterRecord:
        """As `record_adapter`."""
        if await asyncio.to_thread(_json_bytes, folder) <= IN_A_THREAD:
            return await asyncio.to_thread(record_adapter, folder, ref, base, source=source, created_at=created_at)
        found = await self._helpers.run(record, Record(str(folder), base, ref, source, created_at))
        return msgspec.msgpack.decode(found, type=AdapterRecord)


def inspect(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    """The task of `Inspection.settings`."""
    asked = msgspec.msgpack.decode(arguments, type=Inspect)
    return msgspec.msgpack.encode(inspect_adapter(Path(asked.folder), asked.base, context.progress).settings)


def record(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    """The task of `Inspection.record`."""
    asked = msgspec.msgpack.decode(arguments, type=Record)
    folder = Path(asked.folder)
    return msgspec.msgpack.encode(
        record_adapter(
            folder, asked.ref, asked.base, source=asked.source, created_at=asked.created_at, progress=context.progress
        )
    )


def _json_bytes(folder: Path) -> int:
    """How much JSON the files claim to hold; 0 for files that are none of an adapter: whoever reads them says why.

    Raises `StorageError` leaves.
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
