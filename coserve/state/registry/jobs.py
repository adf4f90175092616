"""The registry's jobs and their events."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from typing import Final, Unpack

import msgspec

from coserve.core.access.principal import idempotency_key as scoped_key
from coserve.core.access.principal import principal
from coserve.core.errors import JobNotFound, WrongJobState
from coserve.core.schemas.jobs import EventLevel, EventType, JobEvent
from coserve.core.training.jobs import JobState
from coserve.core.training.step_metrics import StepMetrics
from coserve.state.registry.database import Database
from coserve.state.registry.missing_samples import missing_notes, passed_step
from coserve.state.registry.records import EventFields, JobRecord

log = logging.getLogger(__name__)

UNFINISHED: Final = tuple(state for state in JobState if not state.terminal)
JOB: Final = "SELECT record, project FROM jobs WHERE id = ?"
MAX_NOTES = 16
"""Most notes in a job's record."""

# msgpack, unlike JSON, keeps every float exactly.
_decode = msgspec.msgpack.Decoder(JobRecord).decode
_encode = msgspec.msgpack.Encoder().encode
_decode_event = msgspec.msgpack.Decoder(JobEvent).decode


def _events(job: JobRecord, rows: Iterable[tuple[int, bytes]]) -> list[JobEvent]:
    """Decode the events in `rows`, each a number and a record. A damaged one becomes a message that says so."""
    return [_event(job, seq, content) for seq, content in rows]


def _event(job: JobRecord, seq: int, content: bytes) -> JobEvent:
    try:
        event = _decode_event(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        event = None
    if event is None or (event.job, event.seq) != (job.spec.id, seq):
        message = f"event {seq} is damaged"
        return JobEvent(
            seq=seq, job=job.spec.id, created_at=job.created_at, level="error", type="message", message=message
        )
    return event


def _job(id: str, content: bytes, field: str = "id") -> JobRecord:
    """Decode the record of job `id`. Raises `JobNotFound`, for `field`, if it is damaged."""
    try:
        record = _decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        record = None
    if record is None or record.spec.id != id:
        raise JobNotFound(f"the record of job {id!r} is damaged", field=field)
    return record


class JobTable(Database):
    """Queries of jobs and their events, and the helpers with which `Registry` changes them."""

    def check(self) -> None:
        super().check()
        self._refuse_later("jobs", "SELECT id, record FROM jobs", _decode)

    def job_with_key(self, idempotency_key: str) -> JobRecord | None:
        """Return the job that a request with this key created, if any."""
        key = scoped_key(idempotency_key)
        row = self._db.execute("SELECT id, record FROM jobs WHERE idempotency_key = ?", (key,)).fetchone()
        return None if row is None else _job(row[0], row[1], "idempotency_key")

    def job(self, id: str, field: str = "id") -> JobRecord:
        """Return one job. Raises `JobNotFound`, for `field`; also for a record that was damaged from outside."""
        return _job(id, self._job_row(id, field), field)

    def _undamaged_job(self, id: str) -> JobRecord | None:
        """Return one job; None: its record is damaged. Raises `JobNotFound`."""
        content = self._job_row(id)
        try:
            return _job(id, content)
        except JobNotFound:
            return None

    def _job_row(self, id: str, field: str = "id") -> bytes:
        row: tuple[bytes, str] | None = self._db.execute(JOB, (id,)).fetchone()
        if row is None or not principal().sees(row[1]):
            raise JobNotFound(f"no job {id!r}", field=field)
        return row[0]

    def jobs(
        self,
        *,
        after: str | None = None,
        limit: int = 100,
        states: Collection[JobState] | None = None,
        everyones: bool = False,
        keep: Callable[[JobRecord], bool] = lambda _: True,
    ) -> list[JobRecord]:
        """Return jobs older than `after` that `keep` accepts, newest first; a negative `limit`: all. `everyones`: also
        those that the principal does not see, which share the daemon's queue and limits. Damaged ones are logged and
        left out. Raises `JobNotFound` for an unknown `after`."""
        position = None
        if after is not None:
            self.job(after, "after")
            (position,) = self._db.execute("SELECT position FROM jobs WHERE id = ?", (after,)).fetchone()
        only = None if everyones else principal().only
        wanted = msgspec.json.encode(sorted(JobState if states is None else states)).decode()
        rows = self._db.execute(
            "SELECT id, record FROM jobs WHERE state IN (SELECT value FROM json_each(?)) "
            "AND (? IS NULL OR position < ?) AND (? IS NULL OR project = ?) ORDER BY position DESC",
            (wanted, position, position, only, only),
        )
        return list(islice(filter(keep, self._whole(rows)), None if limit < 0 else limit))

    def _whole(self, rows: Iterable[tuple[str, bytes]]) -> Iterator[JobRecord]:
        for id, record in rows:
            try:
                yield _job(id, record)
            except JobNotFound as error:
                if id not in self._damaged:
                    self._damaged.add(id)
                    log.warning("%s: it is left out", error.message)

    def unfinished(self) -> list[JobRecord]:
        """Return the unfinished jobs of all projects, oldest first."""
        return self.jobs(limit=-1, states=UNFINISHED, everyones=True)[::-1]

    def unfinished_ids(self) -> set[str]:
        """Return the ids of the unfinished jobs of all projects, damaged ones included."""
        return {id for id, state in self._db.execute("SELECT id, state FROM jobs") if state in UNFINISHED}

    def predecessor(self, job: JobRecord) -> JobRecord:
        """Return the job whose end decides from which version the waiting `job` continues: the job it waits for. If
        that job ended without a version while it was itself waiting, the one that it waited for decides, and so on."""
        return self.job(self._awaited(job)[-1])

    def _awaited(self, job: JobRecord) -> list[str]:
        """Return the jobs from the one that `job` waits for back to its `predecessor`; empty for a job that does not
        wait."""
        found = []
        while job.after is not None:
            found.append(job.after)
            before = self._undamaged_job(job.after)
            if before is None:
                break
            job = before
            if not job.state.terminal or job.state is JobState.SUCCEEDED:
                break
        return found

    def _save(self, record: JobRecord) -> JobRecord:
        self._db.execute(
            "UPDATE jobs SET state = ?, record = ? WHERE id = ?", (record.state, _encode(record), record.spec.id)
        )
        return record

    def _move(self, record: JobRecord, state: JobState) -> JobRecord:
        """Return `record` in its new state, with its times. Raises `WrongJobState`."""
        if not record.state.can_become(state):
            raise WrongJobState(f"job {record.spec.id} is {record.state}: it cannot become {state}")
        now = self._clock()
        started = now if state is JobState.RUNNING and record.started_at is None else record.started_at
        return msgspec.structs.replace(
            record, state=state, waiting=None, started_at=started, finished_at=now if state.terminal else None
        )

    def _metrics_until(self, record: JobRecord, step: int) -> list[StepMetrics]:
        """Return the metrics of steps 1 to `step`. A step that ran twice, because of a crash, has its last ones."""
        rows = self._db.execute(
            "SELECT seq, record FROM events WHERE job = ? AND type = 'metrics' AND step <= ? ORDER BY seq",
            (record.spec.id, step),
        )
        by_step = {m.step: m for event in _events(record, rows) if (m := event.metrics) is not None}
        return [by_step[step] for step in sorted(by_step)]

    def sampled(self, record: JobRecord, step: int) -> frozenset[int]:
        """Return the numbers of the prompts that have samples at this step."""
        last = record.samples
        if not last or step > last[0].step:
            return frozenset()
        found = list(last)
        if step < last[0].step:  # a crash set the job back to an earlier step
            rows = self._db.execute(
                "SELECT seq, record FROM events WHERE job = ? AND type = 'sample' AND step = ?", (record.spec.id, step)
            )
            found = [sample for event in _events(record, rows) if (sample := event.sample) is not None]
        return frozenset(sample.prompt for sample in found)

    def _missing_samples(self, record: JobRecord) -> tuple[str, ...]:
        """Return the notes of the record's missing samples: see `missing_notes`."""
        training = record.spec.training
        step = passed_step(training, record.step)
        if not step or len(done := self.sampled(record, step)) == len(training.sample_prompts):
            return ()
        rows = self._db.execute("SELECT seq, record FROM events WHERE job = ? AND type = 'message'", (record.spec.id,))
        return missing_notes(training, step, done, (event.message for event in _events(record, rows)))

    def events(self, id: str, *, after: int = 0, limit: int = 1000) -> list[JobEvent]:
        """Events after `after`, in order. Raises `JobNotFound`."""
        rows = self._db.execute(
            "SELECT seq, record FROM events WHERE job = ? AND seq > ? ORDER BY seq LIMIT ?", (id, after, limit)
        )
        return _events(self.job(id), rows)

    def latest_events(self, id: str, *, before: int | None = None, limit: int = 100) -> list[JobEvent]:
        """Events before number `before`, the latest first. Raises `JobNotFound`."""
        rows = self._db.execute(
            "SELECT seq, record FROM events WHERE job = ? AND (? IS NULL OR seq < ?) ORDER BY seq DESC LIMIT ?",
            (id, before, before, limit),
        )
        return _events(self.job(id), rows)

    def _append(
        self, job: str, type: EventType, message: str, *, level: EventLevel = "info", **fields: Unpack[EventFields]
    ) -> None:
        (last,) = self._db.execute("SELECT coalesce(max(seq), 0) FROM events WHERE job = ?", (job,)).fetchone()
        event = JobEvent(
            seq=last + 1, job=job, created_at=self._clock(), level=level, type=type, message=message, **fields
        )
        of_step = fields.get("sample") or fields.get("metrics")
        self._db.execute(
            "INSERT INTO events VALUES (?, ?, ?, ?, ?)",
            (job, event.seq, type, None if of_step is None else of_step.step, _encode(event)),
        )

    def _noted(self, record: JobRecord, note: str) -> JobRecord:
        """Add an event for the note, and return the record with it."""
        self._append(record.spec.id, "message", note, level="warning")
        if note in record.notes:
            return record
        return msgspec.structs.replace(record, notes=(*record.notes, note)[-MAX_NOTES:])
