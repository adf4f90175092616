"""Imports, loads, shows, downloads, rolls back and deletes adapters.

An import writes files first and the registry second; a deletion does the reverse, and waits for requests in between.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

from coserve.api.adapters.expiry import Expiry
from coserve.api.adapters.filters import EVERY, AdapterFilter
from coserve.api.adapters.in_use import AdaptersInUse
from coserve.api.adapters.inspection import Inspection, refuse_too_large
from coserve.api.adapters.lookup import find_adapter
from coserve.api.adapters.scrub import Scrub
from coserve.api.http.parsing import local_path
from coserve.api.node import Node
from coserve.core.cancellation import Commits, keep_task, uncancelled, uncancelled_thread
from coserve.core.errors import (
    AdapterNotFound,
    BaseMismatch,
    ForbiddenPath,
    InvalidRequest,
    NameTaken,
    StorageError,
    UnsafeAdapter,
)
from coserve.core.limits import PINNED_SHARE
from coserve.core.link.engine import DropAdapter, PrefetchAdapter
from coserve.core.names import ADAPTER_FILES
from coserve.core.schemas.adapters import Adapter, AdapterList, AdapterUpdate, DeletedAdapter, ImportRequest
from coserve.core.types import AdapterRef, BaseSpec
from coserve.core.validation import check_one_given
from coserve.data.offload.pool import HelperPool
from coserve.lora.files.archive import AdapterArchive
from coserve.lora.files.tensorfile import open_regular
from coserve.state.durable import remove_dir, remove_unlisted, replace_dir
from coserve.state.failpoints import failpoint
from coserve.state.registry.records import LOADED, AdapterRecord, Labels
from coserve.state.registry.registry import Registry

log = logging.getLogger(__name__)

T = TypeVar("T")
PART = 100
"""Adapters that one read of a list looks at."""
Forget = Callable[[Registry], tuple[list[AdapterRef], int | None]]
"""Deletes registry rows of one name. Returns the deleted versions, and the name's current version afterwards."""


class Facts:
    """Facts that the registry has of versions besides their records, in one snapshot of it."""

    def __init__(self, registry: Registry) -> None:
        self.labels, self.newest, self.pins = registry.labels, registry.newest_version, registry.pins()
        self.aliases = dict[AdapterRef, list[str]]()
        for alias in registry.aliases():
            for ref in {*alias.refs}:
                self.aliases.setdefault(ref, []).append(alias.name)


class AdapterCatalog:
    """All adapters of the registry."""

    def __init__(self, node: Node, helpers: HelperPool, in_use: AdaptersInUse, scrub: Scrub) -> None:
        """`in_use`: versions that requests in flight use. `scrub`: is told of deleted versions."""
        self._config, self._folder, self._registry, self._engine = node.config, node.folder, node.registry, node.engine
        self._in_use, self._scrub, self._inspection = in_use, scrub, Inspection(helpers)
        self._importing = asyncio.Lock()
        self._commits = Commits()
        self._expiry: Expiry | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        """Removals of deleted versions that requests still use."""

    def open(self) -> None:
        """Begin to delete adapters whose time to live is over."""
        self._expiry = self._expiry or Expiry(self._registry, self._expire, time.time)

    async def close(self) -> None:
        """Wait for imports and deletions in progress. The next start removes the files of versions in use."""
        if self._expiry is not None:
            self._expiry.close()
        await self._commits.close()
        for task in self._leaving:
            task.cancel()

    # ---- import

    async def import_files(
        self, request: ImportRequest, upload: Path | None, check: Callable[[Path], Awaitable[None]]
    ) -> Adapter:
        """Import PEFT files as the next version of `request.name`; durable when this returns.

        `check` is called with the folder of the files; it may raise. Raises `AdapterError` subclasses,
        `AdapterTooLarge`, `ForbiddenPath`, `InvalidRequest`, `StorageFull`, `EngineUnavailable`.
        """
        check_one_given({"path": request.path, "files": upload}, field="path")
        spec = self._engine.spec
        source = upload or local_path(str(request.path), self._config.data_root)
        if not source.is_dir():
            raise InvalidRequest("expected a folder with PEFT files", field="path")
        await check(source)
        refuse_base_name(request.name, spec, field="name")
        return await self.install(source, request.name, spec, origin="import")

    async def install(self, source: Path, name: str, spec: BaseSpec, *, origin: str, new: bool = False) -> Adapter:
        """Publish the PEFT files in `source` as the next version of `name`; durable when this returns.

        `origin`: `AdapterRecord.source`. `new`: the name must have no version. Raises as `import_files`.
        """
        async with _without_links(source, self._config.data_root, self._folder.staging) as files:
            settings = await self._inspection.settings(files, spec)  # refused before anything is copied
            await refuse_too_large(name, settings, spec, self._engine.pool, self._config, field=None)
            async with self._importing:
                if new and await self._registry.read(lambda registry: registry.current_version(name)) is not None:
                    raise InvalidRequest(
                        f"The lora adapter '{name}' has already been loaded. "
                        "If you want to load the adapter in place, set 'load_inplace' to True.",
                        field="lora_name",
                    )
                try:
                    record = await self._commits.run(self._install(files, name, spec, origin))
                except NameTaken as error:
                    error.field = "name"
                    raise
        # The engine packs the files, so that the first request finds them in memory.
        self._engine.offer(PrefetchAdapter(ref=record.ref, digests=record.digests))
        failpoint("api.before_reply")
        return await self._registry.read(lambda registry: self._view(record, Facts(registry)))

    # ---- load and unload, as vLLM does

    async def load(self, source: Path, name: str, *, in_place: bool) -> Adapter:
        """Publish the PEFT files in `source` as the new current version of `name`; durable when this returns.

        `in_place`: the name may exist. Its versions loaded earlier are deleted, once the requests that use them have
        ended, and leave their pin to the new one; those that were imported or trained stay. Raises `InvalidRequest` for
        a name that exists, and as `import_files`.
        """
        spec = self._engine.spec
        refuse_base_name(name, spec, field="lora_name")
        return await self.install(source, name, spec, origin=LOADED, new=not in_place)

    async def _replace_loaded(self, new: AdapterRef) -> None:
        """Delete the versions loaded before `new`, and tell the engine of a pin that it has taken over. Raises
        `AdapterNotFound`."""
        await self._delete(new.id, lambda registry: (registry.delete_loaded(new.id, new.version), new.version))

        def find(registry: Registry) -> AdapterRecord | None:
            return registry.adapter(new.id, new.version) if new in registry.pins() else None

        if (record := await self._registry.read(find)) is not None:
            # Without an engine: the next one is told when it starts.
            self._engine.offer(PrefetchAdapter(ref=new, digests=record.digests, pinned=True))

    async def unload(self, name: str) -> None:
        """Delete the versions of `name` that `load` published. Raises `AdapterNotFound`, or `InvalidRequest` if there
        are only others, whose files are nowhere else."""

        def forget(registry: Registry) -> tuple[list[AdapterRef], int | None]:
            return registry.delete_loaded(name), registry.current_version(name)

        versions = await self._registry.read(lambda registry: registry.versions(name))
        if all(record.source != LOADED for record in versions):
            why = f"adapter {name!r} was not loaded by this path, and its files would be lost: use DELETE /adapters"
            raise InvalidRequest(why, field="lora_name")
        await self._commits.run(self._delete(name, forget))

    async def _install(self, source: Path, name: str, spec: BaseSpec, origin: str) -> AdapterRecord:
        """Reserve a version, copy the files, check the copy, register it; a loaded version replaces those loaded
        earlier. A failure leaves no files."""
        ref = await self._registry(lambda registry: registry.reserve_version(name))
        async with in_threads(replace_dir(self._folder.adapter(ref), point="import")) as target:
            await asyncio.to_thread(_copy, source, target)
            record = await self._inspection.record(target, ref, spec, source=origin, created_at=time.time())
        try:
            await self._registry(lambda registry: registry.add_adapter(record))
        except BaseException:
            await asyncio.to_thread(remove_dir, self._folder.adapter(ref))
            raise
        if origin == LOADED:
            with suppress(AdapterNotFound):  # it was unloaded meanwhile
                await self._replace_loaded(ref)
        return record

    # ---- show

    def _view(
        self, record: AdapterRecord, facts: Facts, versions: list[int] | None = None, *, current: bool = True
    ) -> Adapter:
        labels = facts.labels(record.ref.id)
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
            resident=record.ref in self._engine.residents,
            versions=versions,
            current=current,
            newest=facts.newest(record.ref.id),
            bd_blocks=record.bd_blocks,
            cartridge=record.cartridge,
            prefix_tokens=record.prefix,
            parent=record.parent,
            tags=labels.tags,
            expires_at=labels.expires_at,
            pinned=record.ref in facts.pins,
            aliases=tuple(facts.aliases.get(record.ref, ())),
            corpus_digest=record.corpus_digest,
        )

    async def get(self, name: str, version: int | None) -> Adapter:
        """Return one version (the current one by default) and the numbers of all versions. Raises `AdapterNotFound`."""

        def find(registry: Registry) -> Adapter:
            with registry.snapshot():
                record = registry.adapter(name, version)
                versions = [each.ref.version for each in registry.versions(name)]
                current = record.ref.version == registry.current_version(name)
                return self._view(record, Facts(registry), versions, current=current)

        return await self._registry.read(find)

    async def update(self, name: str, version: int | None, request: AdapterUpdate) -> Adapter:
        """Change tags and the time to live of a name, and whether a version is pinned. Raises `AdapterNotFound`,
        `InvalidRequest` for tags or a time to live of one version, and for a pin `BaseMismatch`, or `InvalidRequest` if
        pinned cartridges would leave requests too little of the KV cache."""
        if version is not None and (request.tags is not None or request.ttl is not None):
            of_one = "ttl" if request.tags is None else "tags"
            raise InvalidRequest(f"expected {name!r}, all of its versions, got {name}@{version}", field=of_one)
        now = time.time()

        def change(registry: Registry) -> AdapterRecord:
            record, labels = registry.adapter(name, version), registry.labels(name)
            if request.pinned and record.base_fingerprint != self._engine.spec.fingerprint:
                raise BaseMismatch(
                    f"adapter {record.ref} belongs to another base, {record.base_name!r}", field="pinned"
                )
            if request.pinned and record.prefix:
                _check_pin(registry, record, int(PINNED_SHARE * self._engine.kv_tokens))
            tags = labels.tags if request.tags is None else tuple(dict.fromkeys(request.tags))
            expires_at = labels.expires_at if request.ttl is None else now + request.ttl if request.ttl else None
            if (changed := Labels(tags=tags, expires_at=expires_at)) != labels:
                registry.set_labels(name, changed)
            if request.pinned is not None:
                registry.set_pinned(record.ref, pinned=request.pinned)
            return record

        async def apply() -> AdapterRecord:
            record = await self._registry(change)
            if request.pinned is not None:
                # Without an engine: the next one is told when it starts.
                self._engine.offer(PrefetchAdapter(ref=record.ref, digests=record.digests, pinned=request.pinned))
            if request.ttl is not None and self._expiry is not None:
                self._expiry.changed()
            return record

        record = await self._commits.run(apply())
        return await self.get(name, record.ref.version)

    async def prefetch(self, name: str, version: int | None) -> Adapter:
        """Let the engine read one version (the current one by default) into memory. Raises `AdapterNotFound`,
        `BaseMismatch`, `EngineUnavailable`."""
        spec = self._engine.spec
        record = await find_adapter(self._registry, name, version, spec, field="id", of_base="it is always in memory")
        self._engine.send(PrefetchAdapter(ref=record.ref, digests=record.digests))
        return await self.get(record.ref.id, record.ref.version)

    async def list(self, after: str | None, limit: int, chosen: AdapterFilter = EVERY) -> AdapterList:
        """Return the current version of each adapter that the filter accepts, by name. Requests that look for their
        adapters wait for a part of a long list, not for all."""
        resident, found = self._engine.residents, list[Adapter]()

        def find(registry: Registry) -> tuple[list[Adapter], str | None]:
            """Return what the next part has, and its last name; None: it is the last part."""
            with registry.snapshot():
                records = registry.adapters(after=after, limit=PART, search=chosen.search)
                last = records[-1].ref.id if len(records) == PART else None
                own = [each for each in records if chosen.accepts(each, resident, registry.labels(each.ref.id).tags)]
                if not own:
                    return [], last
                facts = Facts(registry)
                return [self._view(record, facts) for record in own[: limit + 1 - len(found)]], last

        more = True
        while more and len(found) <= limit:
            part, after = await self._registry.read(find)
            found += part
            more = after is not None
        return AdapterList(data=found[:limit], has_more=len(found) > limit)

    # ---- download

    @asynccontextmanager
    async def archive(self, name: str, version: int | None) -> AsyncIterator[AdapterArchive]:
        """Open a tar file of a version's PEFT files. Raises `AdapterNotFound`, `CorruptAdapter`, `StorageError`."""
        record = await self._registry(lambda registry: registry.adapter(name, version))
        opening = asyncio.create_task(asyncio.to_thread(AdapterArchive, record, self._folder.adapter(record.ref)))
        try:
            yield await uncancelled(opening)
        finally:
            if not opening.cancelled() and opening.exception() is None:
                opening.result().close()

    # ---- roll back and delete

    async def roll_back(self, name: str, version: int) -> Adapter:
        """Make `version` the current one; running requests finish on theirs. Raises `AdapterNotFound`."""
        await self._registry(lambda registry: registry.roll_back(AdapterRef(name, version)))
        return await self.get(name, version)

    async def delete(self, name: str, version: int | None = None) -> DeletedAdapter:
        """Delete every version, or one: no later request finds it, and those that use it finish first. Raises
        `AdapterNotFound`, `AdapterBusy` while a job uses one of them."""

        def forget(registry: Registry) -> tuple[list[AdapterRef], int | None]:
            if version is None:
                return registry.delete_adapter(name), None
            ref = AdapterRef(name, version)
            registry.delete_version(ref)
            return [ref], registry.current_version(name)

        return await self._commits.run(self._delete(name, forget))

    async def _expire(self, name: str, at: float) -> DeletedAdapter:
        """Delete every version if the name's time to live still ends at this time. Raises as `delete`."""
        return await self._commits.run(self._delete(name, lambda registry: (registry.delete_expired(name, at), None)))

    async def _delete(self, name: str, forget: Forget) -> DeletedAdapter:
        """Delete registry rows by `forget`, then the files of the versions that it returns."""
        refs, current = await self._registry.with_reserve(forget)
        # Reads run in order: after this one, every request that found a row earlier is counted as a user of it.
        with suppress(StorageError):
            await self._registry.read(lambda _: None)
        for ref in refs:
            if ref in self._in_use:
                keep_task(self._remove_unused(ref), self._leaving)
            else:
                await self._remove(ref)
        current_ref = None if current is None else str(AdapterRef(name, current))
        return DeletedAdapter(id=name, versions=[ref.version for ref in refs], current_ref=current_ref)

    async def _remove_unused(self, ref: AdapterRef) -> None:
        await self._in_use.unused(ref)
        await self._remove(ref)

    async def _remove(self, ref: AdapterRef) -> None:
        """Remove a version's copies in memory and its files; its row is gone."""
        self._scrub.forget(ref)
        self._engine.offer(DropAdapter(ref=ref))  # the next engine starts with empty memory
        await remove_unlisted(self._folder.adapter(ref), f"adapter {ref}")


@asynccontextmanager
async def _without_links(source: Path, root: Path | None, staging: Path) -> AsyncIterator[Path]:
    """Yield `source`, or a folder with copies of its files if they are links, as in the hub's cache, to files below
    `root`. Raises `UnsafeAdapter` for other links."""
    if root is None or not any((source / name).is_symlink() for name in ADAPTER_FILES):
        yield source
        return
    folder = staging / f"links-{secrets.token_hex(8)}"
    try:
        await uncancelled_thread(_copy_linked, source, folder, root)
        yield folder
    finally:
        await uncancelled_thread(shutil.rmtree, folder, ignore_errors=True)


def _copy_linked(source: Path, folder: Path, root: Path) -> None:
    folder.mkdir()
    for name in ADAPTER_FILES:
        try:
            found = local_path(str(source / name), root)
        except (ForbiddenPath, InvalidRequest):
            raise UnsafeAdapter(f"{name}: expected a file, or a link to one under data_root") from None
        with os.fdopen(open_regular(found.parent, found.name), "rb") as file, (folder / name).open("xb") as target:
            shutil.copyfileobj(file, target)


def _copy(source: Path, target: Path) -> None:
    for name in ADAPTER_FILES:
        if not stat.S_ISREG((source / name).lstat().st_mode):
            raise UnsafeAdapter(f"{name}: expected a regular file")
        shutil.copyfile(source / name, target / name, follow_symlinks=False)


@asynccontextmanager
async def in_threads(block: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter and exit a context manager in threads. The caller must not be cancelled in between."""
    stack = ExitStack()
    entered = await asyncio.to_thread(stack.enter_context, block)
    try:
        yield entered
    except BaseException as error:
        if not await asyncio.to_thread(stack.__exit__, type(error), error, error.__traceback__):
            raise
    else:
        await asyncio.to_thread(stack.close)


def refuse_base_name(name: str, base: BaseSpec, *, field: str) -> None:
    """Raise `InvalidRequest` for an adapter with the base's name."""
    if name.casefold() == base.name.casefold():
        raise InvalidRequest(f"{name!r} is the name of the base: choose another one for the adapter", field=field)


def _check_pin(registry: Registry, record: AdapterRecord, most: int) -> None:
    """Raise `InvalidRequest` if the KV prefixes of pinned adapters would have more than `most` tokens with this one."""
    found = (registry.adapter(ref.id, ref.version) for ref in registry.pins() if ref != record.ref)
    pinned = sum(other.prefix for other in found if other.base_fingerprint == record.base_fingerprint)
    if pinned + record.prefix > most:
        raise InvalidRequest(
            f"expected pinned cartridges of at most {most} tokens in all, half of the KV cache, "
            f"got {record.prefix} beside {pinned}: unpin others, or raise --kv-tokens or --memory-fraction",
            field="pinned",
        )
