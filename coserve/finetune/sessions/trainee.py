"""A session in training, as passes see it, and the verdict of several tensor-parallel ranks on a slice of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from coserve.core.errors import CoserveError, JobOutOfMemory, failure_text
from coserve.core.training.step_metrics import StepMetrics
from coserve.finetune.layers.graph_passes import CaptureFailed
from coserve.finetune.memory_limits import Size
from coserve.finetune.sessions.session import Boundary, Event, FinishUpdate, Training, TrainingSession
from coserve.model.faults import memory_numbers, out_of_memory

PEER_FAILED = "peer_failed"
"""Outcome code: the slice was aborted because another rank failed."""
CAPTURE_FAILED = "capture_failed"
"""Outcome code: layers could not be captured in CUDA graphs."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a slice on one rank."""

    code: str = ""
    """Error code; empty: no error."""
    message: str = ""
    updated: bool = False
    """Whether the slice has begun to change the weights, so that the step cannot be retried."""
    metrics: StepMetrics | None = None
    """Metrics of an optimizer step that the slice finished."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on a slice from all its outcomes. Without a `code` the job continues."""

    code: str = ""
    message: str = ""
    retry: bool = False
    """Whether all ranks may begin the optimizer step again (`Trainer.retry`): with less memory, or, if the code is
    `CAPTURE_FAILED`, without graphs."""


def judge(outcomes: Sequence[Outcome]) -> Verdict:
    """Judge the outcomes, given by rank.

    The job may retry if all errors are out-of-memory or failed captures, and no rank has changed its weights.
    """
    own = [outcome for outcome in outcomes if outcome.code not in ("", PEER_FAILED)]
    if not own:
        assert not any(outcome.code for outcome in outcomes), "expected the error that other ranks have seen"
        return Verdict()
    first = next((outcome for outcome in own if outcome.code == CAPTURE_FAILED), own[0])
    curable = all(outcome.code in (JobOutOfMemory.code, CAPTURE_FAILED) for outcome in own)
    return Verdict(first.code, first.message, retry=curable and not any(outcome.updated for outcome in outcomes))


@dataclass(frozen=True)
class Retry:
    """How all ranks begin an optimizer step again."""

    lower: bool
    """With lower memory limits; False: only without the existing graphs."""
    stop_graphs: str = ""
    """Why graphs are off from now on; empty: they are not."""


def how_to_retry(verdict: Verdict, *, graphs: bool) -> Retry:
    """Return how to retry after a verdict with `retry`. `graphs`: whether graphs hold memory on rank 0, which decides
    for all ranks so that their batches have the same sizes."""
    if verdict.code == CAPTURE_FAILED:
        return Retry(lower=False, stop_graphs=verdict.message)
    return Retry(lower=not graphs)


log = logging.getLogger(__name__)


class Trainee:
    """A session and the suspended coroutine of its verbs. A `TrainingPass` advances it; `abandon` drops what is
    unfinished."""

    def __init__(self, id: str, session: TrainingSession) -> None:
        self.id, self.session = id, session
        self.mid_step = False
        """Whether it is suspended within an optimizer step or its evaluation."""
        self.memory_note: str | None = None
        """Note for the operator: how the job trains since it ran out of memory; None: it has not."""
        self.alone = False
        """Whether it no longer shares forwards with other jobs, because a shared one has failed."""
        self.blocked = any(pair.blocks > 1 for pair in session.optimizer.weights().sites.values())
        """Whether its adapter has block-diagonal matrices."""
        self.batch_tokens = 0
        """Tokens of all rows, of all jobs, in its current or last pass."""
        self._training: Training | None = None

    def begin(self, training: Training) -> None:
        """Set the coroutine that the next pass resumes."""
        assert self._training is None, f"job {self.id} trains already"
        self._training = training

    @property
    def has_work(self) -> bool:
        """Whether a pass can begin."""
        return self._training is not None

    @property
    def shared_size(self) -> Size | None:
        """Size of the next micro-batch, between two of them, if it may share a forward with other jobs."""
        return None

    @property
    def tokens_in_progress(self) -> int:
        """Tokens of its micro-batch being computed; 0: none is."""
        return 0

    def go_on(self, sums: Tensor | None = None) -> Event:
        """Resume the coroutine and return the event that it next suspends for. `sums`: result of the micro-batch that
        it was suspended for. It must have work. Raises `NonFiniteLoss`."""
        assert self._training is not None, f"job {self.id} has nothing to train"
        try:
            event = self._training.send(sums)
        except StopIteration:
            self._training, event = None, Boundary.MICRO_BATCH
        self.mid_step = self._training is not None and not isinstance(event, StepMetrics)
        return event

    def lower_memory(self) -> bool:
        """Use less memory after an out-of-memory, and set `memory_note`. False if nothing is left to lower."""
        return False

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
        numbers, tokens = memory_numbers(error, self.session.device), self.tokens_in_progress
        what = f"one row of {tokens} tokens, each layer computed again" if tokens else "the update of the weights"
        return f"not enough memory for {what} ({numbers}); try a smaller rank or max_length"

    def abandon(self, *, finish_update: bool = False) -> None:
        """Drop the unfinished optimizer step, which begins again. It must have left its pass. `finish_update`: if the
        weights are being updated, complete the update, and the step counts; without `finish_update`, or if completing
        it raises, the weights are lost (`TrainingSession.check_weights`)."""
        training, self._training = self._training, None
        self.mid_step = False
        if training is None:
            return
        try:
            if finish_update:
                with suppress(FinishUpdate):
                    training.throw(FinishUpdate())
        finally:
            training.close()  # each step begins by zeroing the gradients
