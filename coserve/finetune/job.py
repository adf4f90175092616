"""A training job in memory."""

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
    """A training loop and its suspended state. A `TrainingPass` advances it; `abandon` drops the unfinished step."""

    def __init__(self, loop: TrainingLoop, checkpoints: JobCheckpoints) -> None:
        self.loop, self.session, self.checkpoints = loop, loop.session, checkpoints
        self.snapshots = JobSnapshots(loop)
        self.mid_step = False
        """Whether it is suspended within an optimizer step or its evaluation."""
        self.memory_note: str | None = None
        """How it trains since it ran out of memory, for the operator."""
        self.alone = False
        """Whether it no longer shares forwards with other jobs, because a shared one has failed."""
        self.blocked = any(pair.blocks > 1 for pair in self.session.optimizer.weights().sites.values())
        """Whether its adapter has block-diagonal matrices."""
        self.batch_tokens = 0
        """Tokens of all rows, of all jobs, in its current or last pass."""
        self._next_tokens: int | None = None
        """Tokens of its own next micro-batch; 0: unknown; None: to be computed."""
        self._training: Training | None = None
        """The suspended coroutine; None: the next micro-batch starts it."""

    @property
    def id(self) -> str:
        return self.loop.spec.id

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the operator."""
        alone = "it trains alone, since a batch that it shared with other jobs failed" if self.alone else None
        return tuple(note for note in (self.memory_note, alone) if note is not None)

    @property
    def shared_rows(self) -> tuple[int, ...] | None:
        """Rows of the next micro-batch, between two micro-batches, if it may share a forward with other jobs; otherwise
        None."""
        return None if self.alone else self.loop.next_rows

    @property
    def next_tokens(self) -> int:
        """Tokens of the next micro-batch as far as known, between two micro-batches; or of the last one if larger, as
        other jobs may join again."""
        if self._next_tokens is None:  # every decision asks
            rows = self.shared_rows
            self._next_tokens = 0 if rows is None else self.loop.size(rows)
        return max(self.batch_tokens, self._next_tokens)

    def go_on(self, sums: Tensor | None = None) -> Event:
        """Resume the loop and return the event that it next suspends for. `sums`: result of the micro-batch that it was
        suspended for. The job must not be finished. Raises `NonFiniteLoss`."""
        if self._training is None:
            self._training = self.loop.run()
        self._next_tokens = None
        event = self._training.send(sums)
        self.mid_step = not isinstance(event, StepMetrics)
        return event

    def lower_memory(self) -> bool:
        """Use less memory after an out-of-memory: the optimizer step, once abandoned, begins again with smaller
        micro-batches. False if nothing is left to lower."""
        note = self.loop.lower_memory()
        if note is not None:
            self.memory_note = note
        return note is not None

    def failure(self, error: Exception) -> tuple[str, str]:
        """Code and message of an error in a slice that several ranks run. Errors that end the job are logged."""
        if out_of_memory(error):
            return JobOutOfMemory.code, self.memory_message(error)
        if isinstance(error, CaptureFailed):
            return CAPTURE_FAILED, str(error)
        code, message = failure_text(error)
        log.error("job %s: %s", self.id, message, exc_info=None if isinstance(error, CoserveError) else error)
        return code, message

    def memory_message(self, error: Exception) -> str:
        """The user's message for an out-of-memory error."""
        numbers, tokens = memory_numbers(error, self.session.device), self.loop.tokens_in_progress
        what = f"one row of {tokens} tokens, each layer computed again" if tokens else "the update of the weights"
        return f"not enough memory for {what} ({numbers}); try a smaller rank or max_length"

    def abandon(self, *, finish_update: bool = False) -> None:
        """Drop the unfinished optimizer step, which begins again. The job must have left its pass. `finish_update`: if
        the weights are being updated, complete the update, and the step counts; without `finish_update`, or if
        completing it raises, the weights are lost (`TrainingSession.check_weights`)."""
        training, self._training = self._training, None
        self.mid_step, self._next_tokens = False, None
        if training is None:
            return
        try:
            if finish_update:
                with suppress(FinishUpdate):
                    training.throw(FinishUpdate())
        finally:
            training.close()  # each step begins by zeroing the gradients


@dataclass(frozen=True)
class LoadedJob:
    """A loaded job that is not registered yet. Call it on the event-loop thread to commit the load."""

    started: JobStarted
    commit: Callable[[], None]

    def __call__(self) -> JobStarted:
        self.commit()
        return self.started
