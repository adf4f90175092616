"""A job in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from coserve.core.errors import CoserveError, JobOutOfMemory, failure_text
from coserve.core.link import JobStarted
from coserve.core.step_metrics import StepMetrics
from coserve.finetune.job_checkpoint import JobCheckpoints
from coserve.finetune.layers.graph_passes import CaptureFailed
from coserve.finetune.loop import TrainingLoop
from coserve.finetune.outcome import CAPTURE_FAILED
from coserve.finetune.publication import JobSnapshots
from coserve.finetune.session import Event, FinishUpdate, Training
from coserve.model.faults import memory_numbers, out_of_memory

log = logging.getLogger(__name__)


class TrainingJob:
    """A training loop and where it is suspended. A `TrainingPass` moves it on; `abandon` takes it back."""

    def __init__(self, loop: TrainingLoop, checkpoints: JobCheckpoints) -> None:
        self.loop, self.session, self.checkpoints = loop, loop.session, checkpoints
        self.snapshots = JobSnapshots(loop)
        self.mid_step = False
        """Suspended within an optimizer step or its evaluation."""
        self.memory_note: str | None = None
        """How it trains since memory ran out."""
        self.alone = False
        """It shares no forward any more: one that it shared has failed."""
        self.blocked = any(pair.blocks > 1 for pair in self.session.optimizer.weights().sites.values())
        """Its adapter has block-diagonal matrices."""
        self.batch_tokens = 0
        """Of all rows of its pass, or of its last one."""
        self._next_tokens: int | None = None
        """Of its own rows of the next micro-batch; 0: not known. None: to be computed."""
        self._training: Training | None = None
        """None: it begins with its next micro-batch."""

    @property
    def id(self) -> str:
        return self.loop.spec.id

    @property
    def notes(self) -> tuple[str, ...]:
        """For an operator."""
        alone = "it trains alone, since a batch that it shared with other jobs failed" if self.alone else None
        return tuple(note for note in (self.memory_note, alone) if note is not None)

    @property
    def shared_rows(self) -> tuple[int, ...] | None:
        """Between two micro-batches: rows of the next one, if it may share a forward with other jobs'."""
        return None if self.alone else self.loop.next_rows

    @property
    def next_tokens(self) -> int:
        """Between two micro-batches: tokens of the next one, as far as known, or of the last one, if those are more, as
        other jobs may join again."""
        if self._next_tokens is None:  # every decision asks
            rows = self.shared_rows
            self._next_tokens = 0 if rows is None else self.loop.size(rows)
        return max(self.batch_tokens, self._next_tokens)

    def go_on(self, sums: Tensor | None = None) -> Event:
        """Run the loop until it is suspended again; what for. `sums`: of the micro-batch that it was suspended for. Not
        of a finished job. Raises `NonFiniteLoss`."""
        if self._training is None:
            self._training = self.loop.run()
        self._next_tokens = None
        event = self._training.send(sums)
        self.mid_step = not isinstance(event, StepMetrics)
        return event

    def lower_memory(self) -> bool:
        """Memory ran out: begin the optimizer step again with smaller micro-batches, once it is abandoned. False:
        nothing is left to lower."""
        note = self.loop.lower_memory()
        if note is not None:
            self.memory_note = note
        return note is not None

    def failure(self, error: Exception) -> tuple[str, str]:
        """Code and message of what a slice raised that several ranks run. Errors that end the job are logged."""
        if out_of_memory(error):
            return JobOutOfMemory.code, self.memory_message(error)
        if isinstance(error, CaptureFailed):
            return CAPTURE_FAILED, str(error)
        code, message = failure_text(error)
        log.error("job %s: %s", self.id, message, exc_info=None if isinstance(error, CoserveError) else error)
        return code, message

    def memory_message(self, error: Exception) -> str:
        """For the user, of an error that says that memory ran out."""
        numbers, tokens = memory_numbers(error, self.session.device), self.loop.tokens_in_progress
        what = f"one row of {tokens} tokens, each layer computed again" if tokens else "the update of the weights"
        return f"not enough memory for {what} ({numbers}); try a smaller rank or max_length"

    def abandon(self, *, finish_update: bool = False) -> None:
        """Drop the unfinished optimizer step, which begins again. The job must have left its pass. Within an update of
        the weights `finish_update` does the rest of it, and the step counts; without it, or if that raises, the weights
        are lost (`TrainingSession.check_weights`)."""
        training, self._training = self._training, None
        self.mid_step, self._next_tokens = False, None
        if training is None:
            return
        try:
            if finish_update:
                with suppress(FinishUpdate):
                    training.throw(FinishUpdate())
        finally:
            training.close()  # a step begins with gradients of 0, so those of this one may stay


@dataclass(frozen=True)
class LoadedJob:
    """A job in memory that is not committed: call it on the event-loop thread to commit it."""

    started: JobStarted
    commit: Callable[[], None]

    def __call__(self) -> JobStarted:
        self.commit()
        return self.started
