"""Jobs that wait for an earlier job of their adapter, and the version they continue from once it has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from coserve.api.adapters.inspection import Inspection
from coserve.api.adapters.lookup import find_adapter
from coserve.api.jobs.conflicts import waiting_text
from coserve.api.jobs.recorder import JobRecorder
from coserve.api.node import Node
from coserve.core.errors import AdapterNotFound, CapacityError, CoserveError, HelperLost, StorageError
from coserve.core.schemas.service import ErrorInfo
from coserve.core.training.jobs import JobState
from coserve.core.types import AdapterRef, LoraSettings
from coserve.state.registry.records import AdapterRecord, JobRecord
from coserve.state.registry.registry import Registry


@dataclass(frozen=True)
class Decision:
    """Decision about a waiting job. `before`: the job whose end decides; `change`: writes the decision to the registry;
    `source`: the version to continue from; `ends`: whether `change` ends the waiting job."""

    waiting: JobRecord
    before: JobRecord
    change: Callable[[Registry], JobRecord]
    source: AdapterRef | None = None
    ends: bool = False


class JobChain:
    """Ends the waits of jobs. `decide` reads files without any lock; the caller of `apply` holds the lock on changes of
    jobs."""

    def __init__(self, node: Node, recorder: JobRecorder, inspection: Inspection) -> None:
        self._folder, self._registry, self._engine = node.folder, node.registry, node.engine
        self._recorder, self._inspection = recorder, inspection

    async def followers(self, ended: str) -> list[str]:
        """Return the unfinished jobs that wait for job `ended`."""

        def find(registry: Registry) -> list[str]:
            return [record.spec.id for record in registry.unfinished() if record.after == ended]

        return await self._recorder.retries.run(f"jobs after {ended}", lambda: self._registry(find))

    async def decide(self, id: str) -> Decision | None:
        """Decide on a waiting job; None: it must wait on. It continues from the version that the job before it
        published, or, if that published none, from its adapter's current version. If there is none either, the job
        fails.

        Raises `StorageError` if an adapter cannot be read now, `EngineUnavailable` before the first engine.
        """
        base = self._engine.spec
        record, before = await self._registry(partial(_waiting, id=id))
        if before is None or record.base_fingerprint != base.fingerprint:
            return None
        if not before.state.terminal:
            if before.spec.id == record.after:
                return None
            relinked = msgspec.structs.replace(record, after=before.spec.id)
            text = f"job {record.after} is over without a version: {waiting_text(relinked)}"
            return Decision(
                record, before, partial(Registry.continue_job, spec=record.spec, after=before.spec.id, message=text)
            )
        source: AdapterRef | None = None
        try:
            version = None if before.result is None else before.result.version
            found = await find_adapter(self._registry, record.spec.adapter, version, base, field="continue_from")
            source = found.ref
            lora = await self._inspection.settings(self._folder.adapter(source), base)
            return Decision(record, before, _continuation(record, before, found, lora), source)
        except HelperLost as error:  # retried, like files that cannot be read now
            raise StorageError(error.message) from error
        except CapacityError:  # not the job's fault
            raise
        except CoserveError as error:
            # The registry's own text for a missing adapter names the job that will publish it, which is this one.
            why = f"no adapter {record.spec.adapter!r}" if isinstance(error, AdapterNotFound) else str(error)
            text = f"the job was to continue from what job {before.spec.id} publishes, which is {before.state}: {why}"
            info = ErrorInfo(code=error.code, message=text)
            change = partial(Registry.set_state, id=id, state=JobState.FAILED, error=info)
            return Decision(record, before, change, source, ends=True)

    async def apply(self, decision: Decision) -> JobRecord | None:
        """Change the job as decided; return None if the decision is outdated."""

        def change(registry: Registry) -> JobRecord:
            record, before = _waiting(registry, decision.waiting.spec.id)
            if record.after is None and not decision.ends:
                return record  # changed by an earlier call
            decided_on = (decision.waiting.after, decision.before.spec.id, decision.before.state)
            if before is None or (record.after, before.spec.id, before.state) != decided_on:
                raise _Outdated
            if decision.source is not None:
                registry.adapter(decision.source.id, decision.source.version)  # raises if it was deleted meanwhile
            return decision.change(registry)

        try:
            if decision.ends:
                return await self._recorder.end(decision.waiting.spec.id, change)
            return await self._registry.with_reserve(change)
        except (_Outdated, AdapterNotFound):
            return None


class _Outdated(Exception):
    """The state that a decision was based on has changed."""


def _waiting(registry: Registry, id: str) -> tuple[JobRecord, JobRecord | None]:
    """Return a job, and the one whose end it waits for, if it waits."""
    record = registry.job(id)
    return record, None if record.after is None or record.state.terminal else registry.predecessor(record)


def _continuation(
    record: JobRecord, before: JobRecord, source: AdapterRecord, lora: LoraSettings
) -> Callable[[Registry], JobRecord]:
    """Return the change that ends the job's wait, so that it continues from `source`."""
    spec = msgspec.structs.replace(record.spec, init_from=source.ref, init_digests=source.digests, lora=lora)
    text = f"continues from {source.ref}"
    if before.result is None:
        text = f"job {before.spec.id} is {before.state} and published nothing: {text}"
    return partial(Registry.continue_job, spec=spec, after=None, message=text)
