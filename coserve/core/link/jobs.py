"""Messages about jobs and clients' training sessions; of those about jobs, those to the engine come first."""

from __future__ import annotations

from coserve.core.training.jobs import JobSpec
from coserve.core.training.schemas import Call, SessionSpec
from coserve.core.training.step_metrics import StepMetrics
from coserve.core.types import AdapterRef, Message


class StartJob(Message, frozen=True):
    """Queue a job. It continues from its last checkpoint if it has one. `paused`: it waits for `ResumeJob`."""

    spec: JobSpec
    paused: bool = False


class PauseJob(Message, frozen=True):
    id: str


class ResumeJob(Message, frozen=True):
    id: str


class CancelJob(Message, frozen=True):
    id: str


class SnapshotDone(Message, frozen=True):
    """End sampling from a `JobSnapshot`: its adapter is dropped, and the job may go on."""

    id: str
    ref: AdapterRef


class JobStarted(Message, frozen=True):
    id: str
    total_steps: int
    resumed_from: int = 0
    """Step of the checkpoint that the job resumed from."""
    note: str | None = None
    """Why it resumed from an older checkpoint than its last one; stored in the job's record."""


class JobPaused(Message, frozen=True):
    id: str


class JobProgress(Message, frozen=True):
    id: str
    metrics: StepMetrics


class JobCheckpoint(Message, frozen=True):
    """A checkpoint is durable in the job's folder."""

    id: str
    step: int


class JobSnapshot(Message, frozen=True):
    """The adapter of a job after `step` can be used by requests, under a name that no user can give, until
    `SnapshotDone`."""

    id: str
    step: int
    ref: AdapterRef
    final: bool = False
    """The job is trained: these weights are to be published."""


class JobNote(Message, frozen=True):
    """A warning about a job that continues, sent as an event. `kept`: it is also stored in the job's record."""

    id: str
    message: str
    kept: bool = False


class JobWaiting(Message, frozen=True):
    """Why a job waits: for memory, while queued; or, with all steps done, for the disk, since its adapter's files
    cannot be written now and are retried."""

    id: str
    message: str


class JobSucceeded(Message, frozen=True):
    """The adapter's files are durable, and requests may use the version."""

    id: str
    ref: AdapterRef


class JobFailed(Message, frozen=True):
    id: str
    code: str
    message: str


class JobCancelled(Message, frozen=True):
    id: str


class OpenSession(Message, frozen=True, kw_only=True):
    """Queue a client's training session, as a job. Answers: `JobStarted` once it is in memory, `JobWaiting` while it
    waits for memory; its end is `JobFailed` or, after `CancelJob`, `JobCancelled`."""

    spec: SessionSpec


class CallSession(Message, frozen=True, kw_only=True):
    """A call of a session, behind the earlier ones. The answer is `CallDone` or `CallFailed` with its number."""

    id: str
    number: int
    call: Call


class CallDone(Message, frozen=True, kw_only=True):
    """A call of a session was executed. `values`, `metrics`: see `core.training.schemas.Compute`."""

    id: str
    number: int
    values: bytes = b""
    metrics: dict[str, float] = {}


class CallFailed(Message, frozen=True, kw_only=True):
    """A call of a session failed; the session goes on."""

    id: str
    number: int
    code: str
    message: str
