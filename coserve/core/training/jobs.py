"""A training job: its state, and its specification as the registry stores it and the engine runs it."""

from __future__ import annotations

from enum import StrEnum

from coserve.core.training.settings import TrainingSettings
from coserve.core.types import AdapterDigests, AdapterRef, LoraSettings, Wire


class JobState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)

    def can_become(self, other: JobState) -> bool:
        """Whether a job may move from this state to `other`.

        A running job becomes `queued` when its engine dies; it resumes from its last checkpoint.
        """
        return not self.terminal and other is not self and (other is not JobState.SUCCEEDED or self is JobState.RUNNING)


class Teacher(Wire, frozen=True):
    """The teacher of a distillation job: the adapter whose outputs replace the rows' tokens in the loss."""

    ref: AdapterRef
    digests: AdapterDigests
    """Expected digests of the teacher's files."""
    rank: int


class JobSpec(Wire, frozen=True):
    """A complete job: stored by the registry, run by the engine. Its corpus is a file in the job's folder."""

    id: str
    adapter: str
    version: int
    """The version that the job publishes when it succeeds."""
    init_from: AdapterRef | None
    """Adapter to continue instead of a new one; `lora` then has its settings."""
    lora: LoraSettings
    training: TrainingSettings
    rows: int
    tokens: int
    """Tokens in one epoch of the corpus."""
    target_tokens: int
    init_digests: AdapterDigests | None = None
    """Expected digests of the files of `init_from`."""
    teacher: Teacher | None = None
    """Distillation: the loss is the divergence from this adapter's outputs."""
    rows_cut: int = 0
    """Rows truncated to the maximum length."""
    auto: tuple[str, ...] = ()
    """Fields of `training` that the daemon chose."""
    longest: int = 0
    """Tokens of the longest row; 0 for jobs stored before this field existed."""
    corpus_digest: str | None = None
    """SHA-256 (hex) of the corpus's file; None for jobs stored before this field existed."""
    soft_targets: bool = False
    """The corpus has candidates with weights for each target; the loss is the cross-entropy with them."""
    prefix: tuple[int, ...] = ()
    """Token ids. New cartridge: `lora.r` tokens, whose keys and values initialise it. Encoder: see
    `data.documents.encoder`."""
    first_rows: int = 0
    """Encoder: the last rows of the corpus, which are the document's text and are learned before the others
    (reconstruction): see `BatchPlan`."""
    evaluated: bool = False
    """The trained adapter is announced as a snapshot and evaluated by the API process before it is published."""

    @property
    def sources(self) -> tuple[AdapterRef, ...]:
        """Return the adapters whose files the job reads."""
        taught = () if self.teacher is None else (self.teacher.ref,)
        return taught if self.init_from is None else (self.init_from, *taught)
