"""Rows of the registry: jobs and adapters (their events are `coserve.core.schemas.jobs.JobEvent`). Times are seconds
since the epoch."""

from __future__ import annotations

import hashlib
from typing import Final, TypedDict

from coserve.core.names import split_ref
from coserve.core.schemas.documents import DocumentJob
from coserve.core.schemas.jobs import EvalResult, Sample
from coserve.core.schemas.service import ErrorInfo
from coserve.core.training.jobs import JobSpec, JobState
from coserve.core.training.settings import TrainingRequest
from coserve.core.training.step_metrics import StepMetrics
from coserve.core.types import AdapterDigests, AdapterRef, Wire


class JobOrigin(Wire, frozen=True):
    """The origin of a job: ids of uploaded files, and the batch size that its request gave in rows."""

    training_file: str
    validation_file: str | None = None
    batch_rows: int | None = None
    """Mean number of rows of an optimizer step; None: `batch_tokens` was chosen otherwise."""


class JobRecord(Wire, frozen=True):
    """A job and its progress. `step` and `trained_tokens` are as of its last optimizer step."""

    spec: JobSpec
    state: JobState
    created_at: float
    base_fingerprint: str
    started_at: float | None = None
    finished_at: float | None = None
    waiting: str | None = None
    """Why a running job waits, or why a queued one cannot start although it is next; None otherwise."""
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
    """The job that this job waits for: it continues from the version that `after` publishes."""

    request_digests: dict[str, str] = {}
    """Digests of the request that made the job, if it had an `Idempotency-Key`. Also empty for jobs accepted before
    digests were kept."""
    samples: tuple[Sample, ...] = ()
    """Samples of the last step that has any, by prompt."""

    origin: JobOrigin | None = None
    """Uploaded files that the job was made from, if any."""

    document: DocumentJob | None = None
    """Progress of a document's job."""
    asked: TrainingRequest | None = None
    """Training settings of a document's job as requested; "auto" values are chosen once its corpus exists."""

    test: EvalResult | None = None
    """Measures of the trained adapter, if the request had test rows."""

    @property
    def prepared(self) -> bool:
        """Whether the job's corpus exists: a document's is made of questions and answers first."""
        return self.document is None or self.spec.rows > 0

    @property
    def sources(self) -> tuple[AdapterRef, ...]:
        """Adapters that the job needs until it ends: `JobSpec.sources`, and the generator of a document."""
        generator = None if self.document is None else self.document.settings.generator_adapter
        if generator is None:
            return self.spec.sources
        name, version = split_ref(generator)
        assert version is not None, "chosen when the job was accepted"
        return (*self.spec.sources, AdapterRef(name, version))

    @property
    def eta(self) -> float | None:
        """Wall-clock seconds until its last step; None before the first step and once the job has ended."""
        if self.pace is None or self.state.terminal:
            return None
        return self.pace.left(self.total_steps - self.step)


class EventFields(TypedDict, total=False):
    """Fields of a `JobEvent` that some types of events have."""

    metrics: StepMetrics
    state: JobState
    eta: float | None
    sample: Sample
    document: DocumentJob
    test: EvalResult


LOADED: Final = "load"
"""`AdapterRecord.source` of versions that `/v1/load_lora_adapter` published."""


class AdapterRecord(Wire, frozen=True):
    """One version of an adapter; its files lie in the data folder."""

    ref: AdapterRef
    rank: int
    alpha: float
    targets: tuple[str, ...]
    base_fingerprint: str
    base_name: str
    source: str
    """`job:<id>`, `import`, `load` or `convert:<name@version>`."""
    created_at: float
    bytes: int
    sha256: str
    """SHA-256 of the weights file, hex."""
    config_sha256: str = ""
    """SHA-256 of `adapter_config.json`, hex; empty for versions registered before it was kept."""
    alphas: tuple[float, ...] | None = None
    """See `AdapterDigests.alphas`."""
    bd_blocks: int = 1
    """See `LoraSettings.bd_blocks`; also 1 for versions registered before it was kept."""
    cartridge: bool = False
    """See `LoraSettings.cartridge`; `rank` is then its tokens."""
    prefix_tokens: int = 0
    """See `LoraSettings.prefix_tokens`."""
    continues: AdapterRef | None = None
    """The version that the job continued. None: none, or registered before it was kept."""
    corpus_digest: str | None = None
    """`JobSpec.corpus_digest` of the job. None: no job, or registered before it was kept."""

    @property
    def prefix(self) -> int:
        """Tokens of its KV prefix, alone or beside LoRA; 0: none."""
        return self.rank if self.cartridge else self.prefix_tokens

    @property
    def parent(self) -> str | None:
        """The version that this one was made of, by a job or a conversion."""
        kind, _, ref = self.source.partition(":")
        return ref if kind == "convert" else None if self.continues is None else str(self.continues)

    @property
    def digests(self) -> AdapterDigests:
        return AdapterDigests(self.sha256, self.config_sha256, self.alphas)


class AliasRecord(Wire, frozen=True):
    """A name that means a version of an adapter."""

    name: str
    target: AdapterRef
    updated_at: float
    canary: AdapterRef | None = None
    """Another version, which gets a fraction of the requests."""
    weight: float = 0.0
    """Fraction of the requests that get the canary, 0 to 1."""
    previous: AdapterRef | None = None
    """The target before this one."""

    def chosen(self, key: str) -> AdapterRef:
        """Return the version for a request, by the hash of its key: the same for the same key."""
        share = int.from_bytes(hashlib.sha256(f"{self.name}/{key}".encode()).digest()[:8]) / 2**64
        return self.target if self.canary is None or share >= self.weight else self.canary

    @property
    def refs(self) -> tuple[AdapterRef, ...]:
        """Versions that requests may get."""
        return (self.target,) if self.canary is None else (self.target, self.canary)


class Labels(Wire, frozen=True):
    """Tags and expiry of a name. `expires_at`: seconds since the epoch at which it is deleted; None: never."""

    tags: tuple[str, ...] = ()
    expires_at: float | None = None


WINDOW = 20
"""Number of recent steps in the mean."""


class Pace(Wire, frozen=True):
    """Mean wall-clock seconds of a job's recent steps. Time that the job waits for requests and other jobs counts. Time
    in which it does not run (paused, or the engine died) does not count."""

    at: float
    """End of its last step, or when it began or resumed: seconds since the epoch."""
    seconds: float = 0.0
    intervals: int = 0
    """Number of steps in the mean, at most `WINDOW + 1`. The first step, which may compile kernels, counts only until
    the second."""

    def step(self, now: float) -> Pace:
        """Return the pace after one more step, which ended `now`."""
        intervals = min(self.intervals + 1, WINDOW + 1)
        change = max(0.0, now - self.at) - self.seconds
        return Pace(now, self.seconds + change / max(1, intervals - 1), intervals)

    def left(self, steps: int) -> float | None:
        """Return the seconds that `steps` steps take; None before the first step."""
        return max(0, steps) * self.seconds if self.intervals else None
