"""Rows of the registry: jobs and adapters (their events are `coserve.core.schemas.JobEvent`). Times are seconds since
the epoch."""

from __future__ import annotations

from coserve.core.schemas import ErrorInfo, Sample
from coserve.core.step_metrics import StepMetrics
from coserve.core.types import AdapterDigests, AdapterRef, JobSpec, JobState, Wire
from coserve.state.pace import Pace


class JobRecord(Wire, frozen=True):
    """A job and its progress. `step` and `trained_tokens` are as of its last optimizer step."""

    spec: JobSpec
    state: JobState
    created_at: float
    base_fingerprint: str
    started_at: float | None = None
    finished_at: float | None = None
    waiting: str | None = None
    """Why a running job waits, or one in line besides its turn, if it does."""
    step: int = 0
    total_steps: int = 0
    metrics: StepMetrics | None = None
    pace: Pace | None = None
    trained_tokens: int = 0
    error: ErrorInfo | None = None
    result: AdapterRef | None = None
    metadata: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    """Notes for the user who submitted the job."""
    after: str | None = None
    """The job whose end this job waits for: it continues from the version that that one publishes."""

    request_digests: dict[str, str] = {}
    """Of the request that made it, if it had an `Idempotency-Key`; empty too for a job that was accepted before this
    was kept."""
    samples: tuple[Sample, ...] = ()
    """Those of the last step that has any, by prompt."""

    @property
    def eta(self) -> float | None:
        """Seconds until its last step, by the wall clock; None before the first one and at the end."""
        if self.pace is None or self.state.terminal:
            return None
        return self.pace.left(self.total_steps - self.step)


class AdapterRecord(Wire, frozen=True):
    """One version of an adapter; its files lie in the data folder."""

    ref: AdapterRef
    rank: int
    alpha: float
    targets: tuple[str, ...]
    base_fingerprint: str
    base_name: str
    source: str
    """`job:<id>`, `import` or `convert:<name@version>`."""
    created_at: float
    bytes: int
    sha256: str
    """Of the weights' file."""
    config_sha256: str = ""
    """Of `adapter_config.json`; empty for a version that was registered before this was kept."""
    alphas: tuple[float, ...] | None = None
    """As `AdapterDigests.alphas`."""
    bd_blocks: int = 1
    """As `LoraSettings.bd_blocks`; 1 too for a version that was registered before this was kept."""

    @property
    def digests(self) -> AdapterDigests:
        return AdapterDigests(self.sha256, self.config_sha256, self.alphas)
