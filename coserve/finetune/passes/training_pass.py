"""One packed batch of one or several jobs: its forward and backward, then the updates of jobs whose step is complete.

Each job has a segment of the batch, with its own LoRA rank, targets, dropout, loss and gradients, and its own
optimizer, schedule and seed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor

from coserve.core.errors import EngineFault
from coserve.core.training.micro_step import MicroStep
from coserve.core.training.step_metrics import StepMetrics
from coserve.finetune.micro_batch import MicroBatch, MicroBatchRunner, MicroSteps
from coserve.finetune.packed_rows import pack_jobs
from coserve.finetune.sessions.trainee import Trainee
from coserve.kernels.lora.interface import LoraBackend
from coserve.model.dropout import dropout_of
from coserve.model.faults import contained
from coserve.model.lora import KeptLora, LoraBatch


class TrainingPass:
    """The next micro-batch of a job, or of several jobs in one batch, suspended after each micro-step.

    Several jobs must all request a `MicroBatch` that `learns`, with the NLL loss. A job is in one pass at a time.
    """

    def __init__(
        self,
        jobs: Sequence[Trainee],
        runner: MicroBatchRunner,
        lora_backend: LoraBackend,
        device: torch.device,
        *,
        overlapped: bool = False,
        kept: KeptLora | None = None,
    ) -> None:
        """`overlapped`: slices are only launched, on the current stream. `kept`: cached LoRA terms from earlier
        passes."""
        self._kept = kept
        self._runner, self._lora_backend, self.device, self._overlapped = runner, lora_backend, device, overlapped
        self.members, self.jobs = tuple(jobs), list(jobs)
        """`members`: the jobs that it began with; `jobs`: those that have not left."""
        self.rows = self.tokens = 0
        self.learns = False
        """Whether it has a backward. Known, like `rows` and `tokens`, after the first micro-step."""
        self.next_micro_step = MicroStep.BEGIN
        self.micro_steps_done = 0
        """Micro-steps done in the last slice."""
        self.metrics: list[tuple[Trainee, StepMetrics]] = []
        """Metrics of the optimizer steps that the last slice finished."""
        self.errors: list[tuple[Trainee, Exception]] = []
        """Errors of single jobs' own work in the last slice."""
        self.ended = False
        self._begun = False
        self._asked: list[tuple[Trainee, MicroBatch]] = []
        self._compute: MicroSteps | None = None
        self._updates = deque[tuple[Trainee, MicroStep]]()
        """Jobs with own micro-steps to run, and the kinds of the next ones."""

    def advance(self, micro_steps: int | None, ready: Callable[[], None] = lambda: None) -> None:
        """Run up to `micro_steps` micro-steps of one kind; stop early before another kind or at the end of the pass.

        None: run to the end. Returns once the device is done, unless slices are only launched. Raises errors of the
        forward or backward: then all jobs must be abandoned. Errors of a job's own work, which concern no other job,
        are in `errors`: then that job must be abandoned. `ready` is called when the jobs have announced the verb that
        the first micro-step belongs to, before it runs.
        """
        self.micro_steps_done, self.metrics, self.errors = 0, [], []
        if self._begun and self._compute is None and not self._updates:  # all jobs with work left have left the pass
            self.close()
        with ExitStack() as slices:
            for job in self.jobs:
                slices.enter_context(job.session.timer.slice())
            if not self._begun:
                self._ask()
            ready()
            kind = self.next_micro_step
            while not self.ended and (
                micro_steps is None or (self.micro_steps_done < micro_steps and self.next_micro_step is kind)
            ):
                self._micro_step()
                self.micro_steps_done += 1
            if self.device.type == "cuda" and not self._overlapped:  # the policy needs device time, not launch time
                torch.cuda.current_stream(self.device).synchronize()  # side streams copy on

    def leave(self, job: Trainee) -> None:
        """Remove a job that is abandoned. The others continue, and the job's results are dropped. Its tensors are held
        until the pass ends."""
        self.jobs.remove(job)
        self._updates = deque(own for own in self._updates if own[0] is not job)
        if not self.jobs:
            self.close()

    def close(self) -> None:
        """End the pass and free the memory of unfinished work."""
        if self._compute is not None:
            self._compute.close()
        self._compute, self.ended, self.next_micro_step = None, True, MicroStep.BEGIN

    def _micro_step(self) -> None:
        if self._compute is None and self._updates:
            job, _ = self._updates.popleft()
            self._take(job)
        if self._compute is not None:
            try:
                self.next_micro_step = next(self._compute)
                return
            except StopIteration as end:
                sums_by_job: Tensor = end.value
            self._compute = None
            for (job, _), sums in zip(self._asked, sums_by_job, strict=True):
                if job in self.jobs:
                    self._take(job, sums)
        if self._updates:
            self.next_micro_step = self._updates[0][1]
        else:
            self.close()

    def _ask(self) -> None:
        self._begun = True
        for job in self.jobs:
            self._take(job)
        if self._updates:
            self.next_micro_step = self._updates[0][1]
        if self._asked:
            micro_batches = [micro_batch for _, micro_batch in self._asked]
            self.rows, self.tokens = (
                sum(one.batch.rows for one in micro_batches),
                sum(one.batch.tokens for one in micro_batches),
            )
            self.learns = micro_batches[0].learns
            for job, _ in self._asked:
                job.batch_tokens = self.tokens
            self._compute = _compute(micro_batches, self._runner, self._lora_backend, self.device, self._kept)

    def _take(self, job: Trainee, sums: Tensor | None = None) -> None:
        """Resume a job's own coroutine and file the event: see `Trainee.go_on`."""
        try:
            with contained(self.device):
                event = job.go_on(sums)
        except EngineFault:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this job's alone
            self.errors.append((job, error))
            return
        match event:
            case MicroBatch():
                self._asked.append((job, event))
            case MicroStep():
                self._updates.append((job, event))
            case StepMetrics():
                self.metrics.append((job, event))
            case _:  # its next micro-batch is for another pass
                pass


def _compute(
    micro_batches: Sequence[MicroBatch],
    runner: MicroBatchRunner,
    lora_backend: LoraBackend,
    device: torch.device,
    kept: KeptLora | None,
) -> MicroSteps:
    """Forward and backward of all micro-batches, or the evaluation of one: see `MicroBatchRunner`."""
    for each in micro_batches:
        each.prepare()
    first = micro_batches[0]
    tokens = sum(each.batch.tokens for each in micro_batches)
    graphed = first.learns and all(each.dropout is None and each.loss.teacher is None for each in micro_batches)
    graphed = graphed and not first.batch.encoded
    in_all = runner.padded_size(tokens) if graphed else tokens
    rows = pack_jobs([each.batch for each in micro_batches], device, in_all)
    dropout = dropout_of(rows.token_bounds, [each.dropout for each in micro_batches])
    adapters = tuple([part for each in micro_batches for part in each.weights.parts])
    lora = LoraBatch(rows.segments_of(len(adapters)), adapters, lora_backend, dropout, kept)
    if not first.learns:
        return (yield from runner.evaluate(rows, lora, first.loss))
    trainable, grads = (
        [[tensor for each in layer for tensor in each] for layer in zip(*by_job, strict=True)]
        for by_job in ([each.trainable for each in micro_batches], [each.grads for each in micro_batches])
    )
    how = replace(first.how, compiled=all(each.how.compiled for each in micro_batches))
    noises = [each.noise for each in micro_batches]
    return (yield from runner.forward_backward(rows, lora, trainable, grads, first.loss, how, noises))
