"""The registry: jobs, their events and adapters, API keys and quotas. Every change is durable when its method returns.

Records of projects that the running request's principal does not see are treated as missing (`core.access.principal`).
"""

from __future__ import annotations

from typing import Unpack

import msgspec

from coserve.core.access.principal import idempotency_key as scoped_key
from coserve.core.errors import AdapterBusy, WrongJobState
from coserve.core.schemas.documents import DocumentJob
from coserve.core.schemas.jobs import EventLevel, EventType, Sample
from coserve.core.schemas.service import ErrorInfo
from coserve.core.training.jobs import JobSpec, JobState
from coserve.core.training.step_metrics import StepMetrics
from coserve.core.types import AdapterRef
from coserve.state.registry.access import AccessTable
from coserve.state.registry.adapters import AdapterTable
from coserve.state.registry.records import LOADED, AdapterRecord, EventFields, JobRecord, Pace

_encode = msgspec.msgpack.Encoder().encode


class Registry(AccessTable, AdapterTable):
    """One connection, used by the thread that made it: see `RegistryThread` for the event loop's side."""

    def create_job(self, record: JobRecord, *, idempotency_key: str | None = None) -> JobRecord:
        """Accept a job and return its record. A known key returns the job that it created.

        The record's version comes from `next_version`, called in the same function on the registry's thread.
        """
        spec = record.spec
        stored_key = None if idempotency_key is None else scoped_key(idempotency_key)
        with self._transaction():
            if idempotency_key is not None and (first := self.job_with_key(idempotency_key)) is not None:
                return first
            self._claim_version(AdapterRef(spec.adapter, spec.version))
            self._db.execute(
                "INSERT INTO jobs (id, state, idempotency_key, record, project) VALUES (?, ?, ?, ?, ?)",
                (spec.id, record.state, stored_key, _encode(record), self.owner(spec.adapter)),
            )
            self._append(spec.id, "state", f"job {record.state}", state=record.state)
            if (document := record.document) is not None:
                text = f"{document.phase}: {document.done} of {document.total}"
                self._append(spec.id, "document", text, document=document)
            for note in record.notes:
                self._append(spec.id, "message", note, level="warning")
            self._log_on_commit(
                "job accepted",
                job=spec.id,
                adapter=spec.adapter,
                version=spec.version,
                rows=spec.rows,
                tokens=spec.tokens,
            )
        return record

    def unfinished_of(self, project: str) -> int:
        """Return the number of a project's unfinished jobs."""
        return sum(self.owner(job.spec.adapter) == project for job in self.unfinished())

    def set_state(self, id: str, state: JobState, *, error: ErrorInfo | None = None, message: str = "") -> JobRecord:
        """Change a job's state and add an event. Raises `JobNotFound`, `WrongJobState`; for success see `succeed`."""
        assert state is not JobState.SUCCEEDED, "a job succeeds together with its adapter"
        with self._transaction():
            record = msgspec.structs.replace(self._move(self.job(id), state), error=error)
            text = message or (error.message if error is not None else f"job {state}")
            self._append(id, "state", text, level="info" if error is None else "error", state=state)
            spec, why = record.spec, error.message if error is not None else message or None
            code = None if error is None else error.code
            self._log_on_commit(f"job {state}", job=id, adapter=spec.adapter, step=record.step, error=code, reason=why)
            return self._save(record)

    def continue_job(self, spec: JobSpec, after: str | None, message: str) -> JobRecord:
        """End a job's wait, so that it runs as `spec`, or let it wait for job `after` instead. Raises `JobNotFound`,
        `WrongJobState`."""
        with self._transaction():
            record = self.job(spec.id)
            if record.state.terminal:
                raise WrongJobState(f"job {spec.id} is {record.state}: it continues from nothing")
            self._append(spec.id, "message", message)
            self._log_on_commit("job waits no longer" if after is None else "job waits", job=spec.id, reason=message)
            return self._save(msgspec.structs.replace(record, spec=spec, after=after))

    def record_start(self, id: str, total_steps: int, resumed_from: int, note: str | None = None) -> JobRecord:
        """Record that the engine runs the job from step `resumed_from` on. Missing samples of earlier steps become a
        note, in addition to `note`. Raises `JobNotFound`, `WrongJobState`."""
        with self._transaction():
            record = self.job(id)
            if record.state is not JobState.RUNNING:
                record = self._move(record, JobState.RUNNING)
            metrics, now = self._metrics_until(record, resumed_from), self._clock()
            record = msgspec.structs.replace(
                record,
                waiting=None,
                step=resumed_from,
                total_steps=total_steps,
                metrics=metrics[-1] if metrics else None,
                pace=Pace(now) if record.pace is None else msgspec.structs.replace(record.pace, at=now),
                trained_tokens=sum(step.tokens for step in metrics),
            )
            message = f"goes on from step {resumed_from} of {total_steps}" if resumed_from else f"{total_steps} steps"
            self._append(id, "state", f"job running: {message}", state=JobState.RUNNING)
            for text in (*self._missing_samples(record), *(() if note is None else (note,))):
                record = self._noted(record, text)
            what = "job resumed" if resumed_from else "job started"
            self._log_on_commit(what, job=id, adapter=record.spec.adapter, step=resumed_from, steps=total_steps)
            return self._save(record)

    def record_step(self, id: str, metrics: StepMetrics) -> JobRecord:
        """Record that one optimizer step is done. Raises `JobNotFound`."""
        with self._transaction():
            record = self.job(id)
            record = msgspec.structs.replace(
                record,
                step=metrics.step,
                total_steps=metrics.total_steps,
                metrics=metrics,
                pace=None if record.pace is None else record.pace.step(self._clock()),
                trained_tokens=record.trained_tokens + metrics.tokens,
            )
            self._append(id, "metrics", f"step {metrics.step}/{metrics.total_steps}", metrics=metrics, eta=record.eta)
            return self._save(record)

    def record(self, id: str, type: EventType, message: str, **fields: Unpack[EventFields]) -> JobRecord:
        """Add an event with `fields`, and put them into the job's record. Raises `JobNotFound`, `WrongJobState`."""
        with self._transaction():
            record = self.job(id)
            if record.state.terminal:
                raise WrongJobState(f"job {id} is {record.state}: it does nothing more")
            self._append(id, type, message, **fields)
            return self._save(msgspec.structs.replace(record, **fields))

    def record_corpus(self, spec: JobSpec, total_steps: int, document: DocumentJob) -> JobRecord:
        """Record that a document's job has its corpus and waits to be trained, as `spec`: it is in the phase
        `training`. Raises `JobNotFound`, `WrongJobState`."""
        document = msgspec.structs.replace(document, phase="training", done=0, total=total_steps)
        with self._transaction():
            record = self._move(self.job(spec.id), JobState.QUEUED)
            message = f"{spec.rows} rows to learn, {total_steps} steps"
            self._append(spec.id, "state", f"job queued: {message}", state=JobState.QUEUED)
            self._append(spec.id, "document", f"{document.phase}: {message}", document=document)
            return self._save(msgspec.structs.replace(record, spec=spec, total_steps=total_steps, document=document))

    def record_sample(self, id: str, sample: Sample) -> None:
        """Record a generated sample; the first one of its step and prompt is kept. Raises `JobNotFound`,
        `WrongJobState`."""
        with self._transaction():
            record = self.job(id)
            if record.state.terminal:
                raise WrongJobState(f"job {id} is {record.state}: it has no more samples")
            if sample.prompt in self.sampled(record, sample.step):
                return
            self._append(id, "sample", f"sample {sample.prompt} at step {sample.step}", sample=sample)
            last = record.samples
            if not last or sample.step >= last[0].step:
                others = [other for other in last if other.step == sample.step]
                samples = tuple(sorted([*others, sample], key=lambda each: each.prompt))
                self._save(msgspec.structs.replace(record, samples=samples))

    def record_waiting(self, id: str, message: str) -> JobRecord:
        """Record why a job waits: a running one for the disk, a queued one for memory or another daemon. Raises
        `JobNotFound`, `WrongJobState`."""
        with self._transaction():
            record = self.job(id)
            if record.state not in (JobState.RUNNING, JobState.QUEUED):
                raise WrongJobState(f"job {id} is {record.state}: it waits for nothing")
            self._append(id, "message", message, level="warning")
            return self._save(msgspec.structs.replace(record, waiting=message))

    def clear_waiting(self, id: str) -> JobRecord:
        """Forget why the job waits: the engine that said so has died. Raises `JobNotFound`."""
        with self._transaction():
            return self._save(msgspec.structs.replace(self.job(id), waiting=None))

    def record_note(self, id: str, note: str) -> None:
        """Add a note to the job's record, and an event. The record keeps the last `MAX_NOTES`. Raises `JobNotFound`."""
        with self._transaction():
            self._save(self._noted(self.job(id), note))

    def record_message(self, id: str, message: str, *, level: EventLevel = "info", type: EventType = "message") -> None:
        """Add an event to the job. Raises `JobNotFound`."""
        with self._transaction():
            self.job(id)
            self._append(id, type, message, level=level)

    def succeed(self, id: str, adapter: AdapterRecord) -> JobRecord:
        """Commit the job's success and its adapter in one transaction. Raises `JobNotFound`, `WrongJobState`."""
        with self._transaction():
            record = self._move(self.job(id), JobState.SUCCEEDED)
            assert adapter.ref == AdapterRef(record.spec.adapter, record.spec.version), adapter.ref
            record = msgspec.structs.replace(record, result=adapter.ref)
            spec = record.spec
            self._insert_adapter(
                msgspec.structs.replace(adapter, continues=spec.init_from, corpus_digest=spec.corpus_digest)
            )
            self._append(id, "state", f"published {adapter.ref}", state=JobState.SUCCEEDED)
            seconds = self._clock() - (record.started_at or record.created_at)
            self._log_on_commit(
                "job succeeded", job=id, adapter=adapter.ref.id, steps=record.step, seconds=round(seconds, 3)
            )
            self._log_on_commit("adapter published", adapter=adapter.ref.id, version=adapter.ref.version, job=id)
            return self._save(record)

    def delete_job(self, id: str) -> JobRecord | None:
        """Delete a job that has ended, or whose record is damaged, and its events. The adapter it published stays; its
        idempotency key is free again. Returns its record; None: it was damaged.

        Raises `JobNotFound`; `WrongJobState` for a job that has not ended or that another job waits for.
        """
        with self._transaction():
            record = self._undamaged_job(id)
            if record is not None and not record.state.terminal:
                raise WrongJobState(f"the job is {record.state}: only a job that has ended can be deleted", field="id")
            for waiting in self.unfinished():
                if id in self._awaited(waiting):
                    raise WrongJobState(f"job {waiting.spec.id} continues from what this one leaves", field="id")
            self._db.execute("DELETE FROM events WHERE job = ?", (id,))
            self._db.execute("DELETE FROM jobs WHERE id = ?", (id,))
            self._log_on_commit("job deleted", job=id, adapter=None if record is None else record.spec.adapter)
        return record

    # ---- adapters

    def delete_adapter(self, id: str) -> list[AdapterRef]:
        """Delete every version; the caller deletes their files. Raises `AdapterNotFound`, or `AdapterBusy` while
        an unfinished job continues, learns from, asks or publishes the adapter."""
        with self._transaction():
            refs = [record.ref for record in self.versions(id)]
            for job in self.unfinished():
                if job.spec.adapter == id or any(ref.id == id for ref in job.sources):
                    raise AdapterBusy(f"adapter {id!r} is in use by {job.spec.id}", field="adapter")
            if (alias := next(filter(None, map(self._alias_of, refs)), None)) is not None:
                raise AdapterBusy(f"adapter {id!r} is in use by alias {alias}", field="adapter")
            self._db.execute("DELETE FROM adapters WHERE id = ?", (id,))
            self._db.execute("DELETE FROM current WHERE id = ?", (id,))
            self._forget_name(id)
            self._log_on_commit("adapter deleted", adapter=id, versions=", ".join(str(ref.version) for ref in refs))
        return refs

    def delete_expired(self, id: str, at: float) -> list[AdapterRef]:
        """Delete every version if the name's time to live ends at this time, which may have been changed meanwhile.
        Raises as `delete_adapter`."""
        return self.delete_adapter(id) if self.labels(id).expires_at == at else []

    def delete_loaded(self, id: str, before: int | None = None) -> list[AdapterRef]:
        """Delete the versions that `/v1/load_lora_adapter` published, or those of them below `before`, which gets their
        pin and uses. One that an unfinished job uses stays if `before` is given. Raises `AdapterNotFound`,
        `AdapterBusy`."""
        deleted = list[AdapterRef]()
        with self._transaction():
            for record in self.versions(id):
                if record.source != LOADED or (before is not None and record.ref.version >= before):
                    continue
                if before is not None and self._user_of(record.ref) is not None:
                    continue
                if before is not None:
                    self._move_uses(record.ref, before)
                self._delete_version(record.ref)
                deleted.append(record.ref)
        return deleted

    def delete_version(self, ref: AdapterRef) -> None:
        """Delete one version's row. Raises `AdapterNotFound`, or `AdapterBusy` while an unfinished job continues,
        learns from or asks it, or waits for the job that published it."""
        with self._transaction():
            self.adapter(ref.id, ref.version)
            self._delete_version(ref)

    def _delete_version(self, ref: AdapterRef) -> None:
        if (job := self._user_of(ref)) is not None:
            raise AdapterBusy(f"adapter {ref} is in use by {job}", field="adapter")
        self._remove_version(ref)
        self._log_on_commit("adapter deleted", adapter=ref.id, versions=str(ref.version))

    def _user_of(self, ref: AdapterRef) -> str | None:
        """Return an unfinished job that continues, learns from or asks a version, or waits for the job that published
        it; or an alias that means it."""
        if (alias := self._alias_of(ref)) is not None:
            return f"alias {alias}"
        for job in self.unfinished():
            awaited = None if job.after is None else self.predecessor(job).result
            if ref == awaited or ref in job.sources:
                return job.spec.id
        return None
