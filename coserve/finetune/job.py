"""A job in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from coserve.admission.optimizers import BEST, WEIGHTS, StateKind
from coserve.errors import CoserveError, JobOutOfMemory, failure_text
from coserve.finetune.layers.graph_passes import CaptureFailed
from coserve.finetune.loop import Event, Events, SliceTimer, TrainingLoop
from coserve.finetune.outcome import CAPTURE_FAILED
from coserve.model.faults import memory_numbers, out_of_memory
from coserve.model.lora import LoraWeights
from coserve.step_metrics import StepMetrics
from coserve.types import AdapterRef

log = logging.getLogger(__name__)


class TrainingJob:
    """A training loop and where it is suspended. A `TrainingPass` moves it on; `abandon` takes it back."""

    def __init__(self, loop: TrainingLoop, timer: SliceTimer, device: torch.device) -> None:
        """`timer`: the loop's own."""
        self.loop, self.timer = loop, timer
        self.mid_step = False
        """Suspended within an optimizer step or its evaluation."""
        self.memory_note: str | None = None
        """How it trains since memory ran out."""
        self.alone = False
        """It shares no forward any more: one that it shared has failed."""
        self.blocked = any(pair.blocks > 1 for pair in loop.optimizer.weights().sites.values())
        """Its adapter has block-diagonal matrices."""
        self.batch_tokens = 0
        """Of all rows of its pass, or of its last one."""
        self._next_tokens: int | None = None
        """Of its own rows of the next micro-batch; 0: not known. None: to be computed."""
        self._device = device
        self._events: Events = loop.run()

    @property
    def id(self) -> str:
        return self.loop.spec.id

    @property
    def result(self) -> AdapterRef:
        """The version that it publishes."""
        return AdapterRef(self.loop.spec.adapter, self.loop.spec.version)

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
        """Between two micro-batches: tokens of the next one, as far as known, or of the last one, if those are more, as other jobs may join again."""
        if self._next_tokens is None:  # every decision asks
            rows = self.shared_rows
            self._next_tokens = 0 if rows is None else self.loop.size(rows)
        return max(self.batch_tokens, self._next_tokens)

    def ask(self) -> Event:
        """Between two micro-batches: the next one, which `answer` then answers. Not of a finished job."""
        self.mid_step, self._next_tokens = True, None
        return self._next(None)

    def answer(self, sums: Tensor) -> Event:
        """The micro-batch is computed; what comes next. Raises `NonFiniteLoss`."""
        return self._next(sums)

    def update(self) -> Event:
        """Update the weights; what comes next. Raises `NonFiniteLoss`."""
        return self._next(None)

    def _next(self, answer: Tensor | None) -> Event:
        event = self._events.send(answer)
        self.mid_step = not isinstance(event, StepMetrics)
        return event

    def lower_memory(self) -> bool:
        """Memory ran out: begin the optimizer step again with smaller micro-batches, once it is abandoned. False: nothing is left
        to lower."""
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
        numbers, tokens = memory_numbers(error, self._device), self.loop.tokens_in_progress
        what = f"one row of {tokens} tokens, each layer computed again" if tokens else "the update of the weights"
        return f"not enough memory for {what} ({numbers}); try a smaller rank or max_length"

    def abandon(self) -> None:
        """Drop the unfinished optimizer step, which begins again. The job must have left its pass. After a part of an update the job
        cannot go on (`TrainingLoop.check_weights`), unless `TrainingLoop.finish_update` is called first: then the step counts."""
        self._events.close()  # a step begins with gradients of 0, so those of this one may stay
        self.mid_step, self._next_tokens = False, None
        self._events = self.loop.run()

    def final_weights(self) -> Callable[[], LoraWeights]:
        """Begin to copy the fp32 result to the host: the weights of the best evaluation with early stopping, else the last ones.

        The returned function waits for the copy, on any thread, and returns it: valid until the next snapshot.
        """
        self.loop.check_weights()
        best = self.loop.optimizer.has_best
        return self._weights(BEST if best else WEIGHTS, self.loop.optimizer.snapshot())

    def current_weights(self) -> Callable[[], LoraWeights]:
        """As `final_weights`, of the weights as they are after the last finished optimizer step."""
        self.loop.check_weights()
        return self._weights(WEIGHTS, self.loop.optimizer.snapshot(weights_only=True))

    def gathered_weights(self, *, weights_only: bool) -> Callable[[], LoraWeights]:
        """On a rank that follows: as `current_weights`, or without `weights_only` as `final_weights`."""
        return self.current_weights() if weights_only else self.final_weights()

    def _weights(self, kind: StateKind, tensors: Callable[[], Mapping[str, Tensor]]) -> Callable[[], LoraWeights]:
        optimizer, prefix = self.loop.optimizer, f"{kind.name}/"

        def weights() -> LoraWeights:
            found = tensors()
            return optimizer.adapter({n.removeprefix(prefix): t for n, t in found.items() if n.startswith(prefix)})

        return weights
