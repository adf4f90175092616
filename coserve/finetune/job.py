"""A job in memory, advanced slice by slice."""

from __future__ import annotations

from collections.abc import Callable

import torch

from coserve.errors import JobOutOfMemory
from coserve.finetune.loop import Events, SliceTimer, TrainingLoop
from coserve.finetune.optimizer import BEST, WEIGHTS
from coserve.model.faults import memory_numbers, out_of_memory
from coserve.model.lora import LoraWeights
from coserve.types import MicroStep, StepMetrics


class TrainingJob:
    """A training loop and where it is suspended. Only `advance` and `abandon` move it."""

    def __init__(
        self, loop: TrainingLoop, timer: SliceTimer, device: torch.device, *, overlapped: bool = False
    ) -> None:
        """`timer`: the loop's own. `overlapped`: slices are only launched, on the current stream."""
        self.loop = loop
        self.next_micro_step = MicroStep.BEGIN
        self.micro_steps_done = 0
        """In the last slice."""
        self.mid_step = False
        """Suspended within an optimizer step or its evaluation."""
        self.memory_note: str | None = None
        """How it trains since memory ran out."""
        self._timer, self._device, self._overlapped = timer, device, overlapped
        self._events: Events = loop.run()

    @property
    def mid_batch(self) -> bool:
        """Suspended within a micro-batch."""
        return self.next_micro_step is not MicroStep.BEGIN

    def advance(self, micro_steps: int | None) -> StepMetrics | None:
        """Run `micro_steps` micro-steps of one kind, fewer if another kind or the end of the micro-batch comes first.

        None: run to the end of the micro-batch. Returns the metrics of an optimizer step that is now done, evaluation
        included. Where memory runs out, the optimizer step begins again with smaller micro-batches (`memory_note`).
        Raises `NonFiniteLoss`, `JobOutOfMemory`.
        """
        try:
            return self.run_slice(micro_steps)
        except Exception as error:
            if not out_of_memory(error):
                raise
            message = self.memory_message(error)
            if not self.lower_memory():
                raise JobOutOfMemory(message) from error
        # Here the error is gone, and with it the tensors that its traceback held.
        self.abandon()
        return None

    def run_slice(self, micro_steps: int | None) -> StepMetrics | None:
        """`advance` without an answer to lack of memory: it raises what was raised. Returns once the device is done,
        unless slices are only launched."""
        with self._timer.slice():
            metrics = self._advance(micro_steps)
            if (
                self._device.type == "cuda" and not self._overlapped
            ):  # the policy needs the device's time, not the time of the launches
                torch.cuda.current_stream(self._device).synchronize()  # side streams copy on
            return metrics

    def lower_memory(self) -> bool:
        """Memory ran out: begin the optimizer step again with smaller micro-batches, once it is abandoned. False: nothing is left
        to lower."""
        note = self.loop.lower_memory()
        if note is not None:
            self.memory_note, self.micro_steps_done = note, 0
        return note is not None

    def memory_message(self, error: Exception) -> str:
        """For the user, of an error that says that memory ran out."""
        numbers, tokens = memory_numbers(error, self._device), self.loop.tokens_under_way
        what = f"one row of {tokens} tokens, each layer computed again" if tokens else "the update of the weights"
        return f"not enough memory for {what} ({numbers}); try a smaller rank or max_length"

    def _advance(self, micro_steps: int | None) -> StepMetrics | None:
        kind, self.micro_steps_done = self.next_micro_step, 0
        while micro_steps is None or (self.micro_steps_done < micro_steps and self.next_micro_step is kind):
            event = next(self._events, None)
            if event is None:  # the job had finished before
                return None
            self.micro_steps_done += 1
            self.next_micro_step = event if isinstance(event, MicroStep) else MicroStep.BEGIN
            self.mid_step = not isinstance(event, StepMetrics)
            if not isinstance(event, MicroStep):
                return event if isinstance(event, StepMetrics) else None
        return None

    def abandon(self) -> None:
        """Drop the unfinished optimizer step; `advance` then computes it again."""
        self._events.close()
        self.loop.optimizer.zero_grad()
        self.next_micro_step, self.mid_step = MicroStep.BEGIN, False
        self._events = self.loop.run()

    def final_weights(self) -> Callable[[], LoraWeights]:
        """Begin to copy the fp32 result to the host: the weights of the best evaluation with early stopping, else the last ones.

        The returned function waits for the copy, on any thread, and returns it: valid until the next snapshot.
        """
        optimizer, tensors = self.loop.optimizer, self.loop.optimizer.snapshot()
        kind = BEST if optimizer.has_best else WEIGHTS

        def weights() -> LoraWeights:
            found = tensors()
            return optimizer.adapter(
                {n.removeprefix(f"{kind}/"): t for n, t in found.items() if n.startswith(f"{kind}/")}
            )

        return weights
