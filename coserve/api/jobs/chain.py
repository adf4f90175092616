"""Jobs that wait for an earlier job of their adapter, and what they continue from once it has ended."""

from __future__ import annotations

from functools import partial

import msgspec

from coserve.api.adapters.inspection import Inspection
from coserve.api.adapters.lookup import find_adapter
from coserve.api.engine_client import EngineClient
from coserve.api.jobs.conflicts import predecessor, waiting_text
from coserve.api.jobs.recorder import JobRecorder
from coserve.errors import CapacityError, CoserveError, HelperLost, StorageError
from coserve.schemas import ErrorInfo
from coserve.state.folder import DataFolder
from coserve.state.records import JobRecord
from coserve.state.registry import Registry
from coserve.state.thread import RegistryThread
from coserve.types import JobState


class JobChain:
    """Ends the waits of jobs. The caller holds the lock of all changes."""

    def __init__(
        self,
        folder: DataFolder,
        registry: RegistryThread,
        engine: EngineClient,
        recorder: JobRecorder,
        inspection: Inspection,
    ) -> None:
        self._folder, self._registry, self._engine = folder, registry, engine
        self._recorder, self._inspection = recorder, inspection

    async def followers(self, ended: str) -> list[str]:
        """The unfinished jobs that wait for job `ended`."""

        def find(registry: Registry) -> list[str]:
            return [record.spec.id for record in registry.unfinished() if record.after == ended]

        return await self._recorder.retries.run(f"jobs after {ended}", lambda: self._registry(find))

    async def release(self, id: str) -> JobRecord:
        """The job, which waits no longer if the one before it has ended: it then continues from the version that was published, or
        from its adapter's current version if none was; if there is none either, it has failed.

        Raises `EngineUnavailable` before the first engine.
        """
        retries, base = self._recorder.retries, self._engine.spec
        return await retries.run(f"job {id}", lambda: self._release(id, base_fingerprint=base.fingerprint))

    async def _release(self, id: str, base_fingerprint: str) -> JobRecord:
        record = await self._registry(lambda registry: registry.job(id))
        if record.after is None or record.state.terminal or record.base_fingerprint != base_fingerprint:
            return record
        before = await self._registry(partial(predecessor, job=record))
        if not before.state.terminal:
            if before.spec.id == record.after:
                return record
            relinked = msgspec.structs.replace(record, after=before.spec.id)
            return await self._save(relinked, f"job {record.after} is over without a version: {waiting_text(relinked)}")
        try:
            return await self._continue(record, before)
        except HelperLost as error:  # tried again, as what cannot be read now
            raise StorageError(error.message) from error
        except CapacityError:  # no fault of the job
            raise
        except CoserveError as error:
            text = f"the job was to continue from what job {before.spec.id} publishes, which is {before.state}: {error}"
            info = ErrorInfo(code=error.code, message=text)
            return await self._recorder.end(id, lambda registry: registry.set_state(id, JobState.FAILED, error=info))

    async def _continue(self, record: JobRecord, before: JobRecord) -> JobRecord:
        spec, base = record.spec, self._engine.spec
        version = None if before.result is None else before.result.version
        source = await find_adapter(self._registry, spec.adapter, version, base, field="continue_from")
        lora = await self._inspection.settings(self._folder.adapter(source.ref), base)
        spec = msgspec.structs.replace(spec, init_from=source.ref, init_digests=source.digests, lora=lora)
        text = f"continues from {source.ref}"
        if before.result is None:
            text = f"job {before.spec.id} is {before.state} and published nothing: {text}"
        return await self._save(msgspec.structs.replace(record, spec=spec, after=None), text)

    async def _save(self, record: JobRecord, text: str) -> JobRecord:
        spec, after = record.spec, record.after
        return await self._registry.with_reserve(lambda registry: registry.continue_job(spec, after, text))
