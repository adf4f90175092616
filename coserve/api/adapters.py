"""Adapters: import, show, hand out and delete them. Files first and rows second; on deletion the other way round."""

from __future__ import annotations

import asyncio
import shutil
import stat
import tarfile
import time
from collections.abc import AsyncIterator, Callable, Collection
from functools import partial
from pathlib import Path

from coserve.adapters.peft import inspect_adapter
from coserve.adapters.record import record_adapter
from coserve.api.connection import Connection
from coserve.api.requests import local_path
from coserve.config import Config
from coserve.errors import (
    AdapterBusy,
    AdapterExists,
    AdapterNotFound,
    CoserveError,
    EngineUnavailable,
    InvalidRequest,
    UnsafeAdapter,
)
from coserve.link import DropAdapter
from coserve.schemas import Adapter, AdapterList, DeletedAdapter, ImportRequest
from coserve.state.durable import remove_dir, replace_dir
from coserve.state.failpoints import failpoint
from coserve.state.folder import DataFolder
from coserve.state.records import AdapterRecord
from coserve.state.registry import Registry
from coserve.state.thread import RegistryThread
from coserve.types import AdapterRef, BaseSpec

FILES = ("adapter_config.json", "adapter_model.safetensors")
PIECE = 256 << 10


class Adapters:
    """All adapters of the registry. `in_use`: versions that running requests hold."""

    def __init__(
        self,
        config: Config,
        folder: DataFolder,
        registry: RegistryThread,
        engine: Connection,
        in_use: Collection[AdapterRef],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config, self._folder, self._registry = config, folder, registry
        self._engine, self._in_use, self._clock = engine, in_use, clock
        self._importing = asyncio.Lock()

    # ---- import

    async def take(self, request: ImportRequest, upload: Path | None) -> Adapter:
        """Import PEFT files as the next version of `request.name`; durable when this returns.

        Raises `AdapterError` leaves, `ForbiddenPath`, `InvalidRequest`, `StorageFull`, `EngineUnavailable`.
        """
        if (request.path is None) == (upload is None):
            got = "none" if upload is None else "both"
            raise InvalidRequest(f"expected a path or files, got {got}", field="path")
        spec = self._engine.spec
        source = upload or local_path(str(request.path), self._config.data_root)
        if not source.is_dir():
            raise InvalidRequest("expected a folder with PEFT files", field="path")
        await asyncio.to_thread(inspect_adapter, source, spec)  # refused before anything is copied
        async with self._importing:
            record = await self._install(source, request.name, spec)
        failpoint("api.before_reply")
        return self._view(record)

    async def _install(self, source: Path, name: str, spec: BaseSpec) -> AdapterRecord:
        """Copy, check the copy, register it; a job that takes the version first moves the import to the next one."""
        while True:
            version = await self._registry(lambda registry: registry.next_version(name))
            ref = AdapterRef(name, version)
            record = await asyncio.to_thread(self._copy, source, ref, spec)
            try:
                await self._registry(partial(_add, record))
            except AdapterExists:
                # The job's files would land on the same path only after training: nothing of it is there yet.
                await asyncio.to_thread(remove_dir, self._folder.adapter(ref))
            except CoserveError:
                await asyncio.to_thread(remove_dir, self._folder.adapter(ref))
                raise
            else:
                return record

    def _copy(self, source: Path, ref: AdapterRef, spec: BaseSpec) -> AdapterRecord:
        with replace_dir(self._folder.adapter(ref), point="import") as target:
            for name in FILES:
                if not stat.S_ISREG((source / name).lstat().st_mode):
                    raise UnsafeAdapter(f"{name}: expected a regular file")
                shutil.copyfile(source / name, target / name, follow_symlinks=False)
            return record_adapter(target, ref, spec, source="import", created_at=self._clock())

    # ---- show

    def _view(self, record: AdapterRecord, versions: list[int] | None = None) -> Adapter:
        return Adapter(
            id=record.ref.id,
            version=record.ref.version,
            ref=str(record.ref),
            rank=record.rank,
            alpha=record.alpha,
            targets=list(record.targets),
            base=record.base_name,
            base_fingerprint=record.base_fingerprint,
            source=record.source,
            created_at=record.created_at,
            bytes=record.bytes,
            sha256=record.sha256,
            resident=self._engine.resident(record.ref),
            versions=versions,
        )

    async def get(self, name: str, version: int | None) -> Adapter:
        """One version (the latest) and the numbers of all. Raises `AdapterNotFound`."""
        record = await self._registry(lambda registry: registry.adapter(name, version))
        records = await self._registry(lambda registry: registry.versions(name))
        return self._view(record, [each.ref.version for each in records])

    async def list(self, after: str | None, limit: int) -> AdapterList:
        """Latest versions, by name."""
        records = await self._registry(lambda registry: registry.adapters(after=after, limit=limit + 1))
        return AdapterList(data=[self._view(record) for record in records[:limit]], has_more=len(records) > limit)

    # ---- hand out

    async def archive(self, name: str, version: int | None) -> tuple[AdapterRef, int, AsyncIterator[bytes]]:
        """A tar file of PEFT files: its version, its size in bytes, its pieces. Raises `AdapterNotFound`."""
        record = await self._registry(lambda registry: registry.adapter(name, version))
        folder = self._folder.adapter(record.ref)
        heads: list[tuple[Path, bytes, int]] = []
        for file in FILES:
            try:
                size = (folder / file).stat().st_size
            except FileNotFoundError:
                raise AdapterNotFound(f"no files of adapter {record.ref}", field="id") from None
            info = tarfile.TarInfo(f"{record.ref.id}-{record.ref.version}/{file}")
            info.size, info.mtime, info.mode = size, int(record.created_at), 0o644
            heads.append((folder / file, info.tobuf(tarfile.GNU_FORMAT), size))
        total = sum(len(head) + size + -size % tarfile.BLOCKSIZE for _, head, size in heads) + 2 * tarfile.BLOCKSIZE
        return record.ref, total, _tar(heads)

    # ---- delete

    async def delete(self, name: str) -> DeletedAdapter:
        """Every version. Raises `AdapterNotFound`, `AdapterBusy` while a job or a request uses one."""
        if any(ref.id == name for ref in self._in_use):
            raise AdapterBusy(f"adapter {name!r} is in use by running requests", field="id")
        refs = await self._registry(lambda registry: registry.delete_adapter(name))
        for ref in refs:
            try:
                self._engine.send(DropAdapter(ref=ref))
            except EngineUnavailable:
                break  # the next engine has nothing in memory
        for ref in refs:
            await asyncio.to_thread(remove_dir, self._folder.adapter(ref))
        return DeletedAdapter(id=name, versions=[ref.version for ref in refs])


def _add(record: AdapterRecord, registry: Registry) -> None:
    registry.add_adapter(record)


async def _tar(heads: list[tuple[Path, bytes, int]]) -> AsyncIterator[bytes]:
    for path, head, size in heads:
        yield head
        with path.open("rb") as file:  # stays readable if the adapter is deleted meanwhile
            while piece := await asyncio.to_thread(file.read, PIECE):
                yield piece
        yield bytes(-size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)
