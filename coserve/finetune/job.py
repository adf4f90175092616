"""A training job in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from coserve.core.link.jobs import JobStarted
from coserve.finetune.job_checkpoint import JobCheckpoints
from coserve.finetune.loop import TrainingLoop
from coserve.finetune.memory_limits import Size
from coserve.finetune.publication import JobSnapshots
from coserve.finetune.sessions.session import Event
from coserve.finetune.sessions.trainee import Trainee


class TrainingJob(Trainee):
    """The session of a fine-tuning job, with the `TrainingLoop` that decides its steps."""

    def __init__(self, loop: TrainingLoop, checkpoints: JobCheckpoints) -> None:
        super().__init__(loop.spec.id, loop.session)
        self.spec = loop.spec
        self.loop, self.checkpoints, self.snapshots = loop, checkpoints, JobSnapshots(loop)
        self.limits = loop.limits
        self._next_tokens: int | None = None
        """Cached tokens of the job's own next micro-batch; 0: unknown; None: not computed yet."""

    @property
    def notes(self) -> tuple[str, ...]:
        alone = "it trains alone, since a batch that it shared with other jobs failed" if self.alone else None
        return tuple(note for note in (self.memory_note, alone) if note is not None)

    @property
    def has_work(self) -> bool:
        return not self.loop.finished

    @property
    def shared_size(self) -> Size | None:
        rows = None if self.alone or self.spec.prefix else self.loop.next_rows
        return None if rows is None else Size(self.limits.size(rows), len(rows))

    @property
    def tokens_in_progress(self) -> int:
        return self.loop.tokens_in_progress

    @property
    def next_tokens(self) -> int:
        """Predicted tokens of the next batch: those of the job's own next micro-batch, or of its last batch if that was
        larger, since other jobs may join again."""
        if self._next_tokens is None:  # cached: each scheduling decision reads it
            size = self.shared_size
            self._next_tokens = 0 if size is None else size.tokens
        return max(self.batch_tokens, self._next_tokens)

    def go_on(self, sums: Tensor | None = None) -> Event:
        if self._training is None:
            self.begin(self.loop.run())
        self._next_tokens = None
        return super().go_on(sums)

    def lower_memory(self) -> bool:
        """The optimizer step, once abandoned, begins again with smaller micro-batches."""
        note = self.loop.lower_memory()
        if note is not None:
            self.memory_note = note
        return note is not None

    def abandon(self, *, finish_update: bool = False) -> None:
        self._next_tokens = None
        super().abandon(finish_update=finish_update)


@dataclass(frozen=True)
class LoadedJob:
    """A loaded job that is not registered yet. Call it on the event-loop thread to commit the load."""

    started: JobStarted
    commit: Callable[[], None]

    def __call__(self) -> JobStarted:
        self.commit()
        return self.started
