"""Converts adapters between LoRA and BD-LoRA in a helper process. A conversion computes for seconds to minutes, so it
must not run in the engine or the API process."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from coserve.api.adapters.catalog import AdapterCatalog, refuse_base_name
from coserve.api.adapters.lookup import find_adapter
from coserve.api.jobs.sources import UploadedRows
from coserve.api.node import Node
from coserve.core.cancellation import uncancelled, uncancelled_thread
from coserve.core.errors import AdapterError, InvalidRequest, StorageError
from coserve.core.names import ADAPTER_RULE, is_adapter_name
from coserve.core.schemas.adapters import Adapter, ConversionReport, ConvertedAdapter, ConvertRequest, Distillation
from coserve.core.schemas.jobs import FinetuneRequest, Job
from coserve.core.types import AdapterDigests, AdapterRef, BaseSpec
from coserve.data.offload.pool import HelperPool
from coserve.data.offload.protocol import TaskContext
from coserve.lora.files.conversion import ConversionOptions, convert_adapter

NICENESS = 10
"""Niceness of the helper process: the engine and the API have priority."""


class Conversions:
    """Runs conversions one at a time; further ones wait."""

    def __init__(
        self,
        node: Node,
        helpers: HelperPool,
        catalog: AdapterCatalog,
        submit: Callable[[FinetuneRequest, UploadedRows, str | None], Awaitable[Job]],
    ) -> None:
        """`helpers`: a pool for conversions only, since its processes run at a low priority; `submit`:
        `JobManager.submit`."""
        self._folder, self._registry, self._engine = node.folder, node.registry, node.engine
        self._helpers, self._catalog, self._submit = helpers, catalog, submit

    async def close(self) -> None:
        await self._helpers.close()

    async def convert(self, name: str, version: int | None, request: ConvertRequest) -> ConvertedAdapter:
        """Publish the converted adapter, and submit the job that distills it; durable when this returns. Cancelling it
        stops the computation, but not the publication once that has begun.

        Raises `AdapterNotFound`, `BaseMismatch`, `AdapterTooLarge`, `InvalidRequest`, `StorageError` subclasses,
        `EngineUnavailable`, `HelperLost`. If `JobManager.submit` raises, so does this, and nothing is published.
        """
        spec = self._engine.spec
        new = request.name or default_name(name, request.bd_blocks)
        refuse_base_name(new, spec, field="name")
        no_source = "it has nothing to convert; expected an adapter"
        record = await find_adapter(self._registry, name, version, spec, field="adapter", of_base=no_source)
        options = ConversionOptions(request.bd_blocks, request.rank, request.max_error)
        staging = self._folder.staging / f"convert-{secrets.token_hex(8)}"
        try:
            await uncancelled_thread(staging.mkdir)
            source = str(self._folder.adapter(record.ref))
            report = await self._helpers.run(convert, source, str(staging), spec, options, record.digests)
            publication = self._publish(staging, new, spec, record.ref, request.distill)
            adapter, job = await uncancelled(asyncio.create_task(publication))
        except (AdapterError, StorageError):
            await find_adapter(self._registry, name, record.ref.version, spec, field="adapter")  # deleted meanwhile
            raise
        finally:
            await uncancelled_thread(shutil.rmtree, staging, ignore_errors=True)
        return ConvertedAdapter(adapter=adapter, job=job, **msgspec.structs.asdict(report))

    async def _publish(
        self, staging: Path, name: str, spec: BaseSpec, source: AdapterRef, distillation: Distillation | None
    ) -> tuple[Adapter, str | None]:
        """Publish the adapter and submit its job, or neither. Returns both the adapter and the job's id."""
        adapter = await self._catalog.install(staging, name, spec, origin=f"convert:{source}")
        if distillation is None:
            return adapter, None
        try:
            return adapter, await self._distill(adapter, source, distillation)
        except BaseException:
            await self._catalog.delete(adapter.id, adapter.version)
            raise

    async def _distill(self, adapter: Adapter, teacher: AdapterRef, distillation: Distillation) -> str:
        """Submit the distillation job; return its id."""
        request = FinetuneRequest(
            adapter=adapter.id,
            data=distillation.data,
            continue_from=adapter.ref,
            teacher=str(teacher),
            training=distillation.training,
        )
        return (await self._submit(request, UploadedRows(), None)).id


def convert(
    context: TaskContext, source: str, target: str, base: BaseSpec, options: ConversionOptions, digests: AdapterDigests
) -> ConversionReport:
    """Helper task of `Conversions.convert`. `target`: an empty folder."""
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    return convert_adapter(Path(source), Path(target), base, options, digests, context.progress)


def default_name(name: str, blocks: int) -> str:
    """Return the name of a converted adapter. Raises `InvalidRequest` if it would be too long."""
    found = f"{name}-bd{blocks}" if blocks > 1 else f"{name}-lora"
    if not is_adapter_name(found):
        raise InvalidRequest(
            f"expected a name for the converted adapter: {found!r} is not {ADAPTER_RULE}", field="name"
        )
    return found
