"""One job while it runs: a generator of micro-steps over its plan, and where it stands between optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from enum import Enum

import msgspec
import torch

from coserve.corpus.batch_plan import BatchPlan
from coserve.corpus.lr_schedule import learning_rate
from coserve.corpus.tokenized import Corpus
from coserve.errors import NonFiniteLoss
from coserve.finetune.optim import Learner
from coserve.finetune.step import PackedRows, Stepper, pack_rows
from coserve.kernels.lora.backend import Way
from coserve.kernels.lora.segments import Segments
from coserve.model.lora import DropoutSpec, LoraBatch, LoraWeights
from coserve.state.durable import disk_errors
from coserve.state.failpoints import failpoint
from coserve.types import JobSpec, MicroStep, StepMetrics, Wire


class Progress(Wire, frozen=True):
    """Where a job stands after its last optimizer step; with the learner's state, all that a checkpoint needs."""

    step: int = 0
    """Optimizer steps done."""
    trained_tokens: int = 0
    last_loss: float | None = None
    best_valid_loss: float | None = None
    evaluations_without_gain: int = 0
    pending: StepMetrics | None = None
    """The last step's metrics, while its evaluation is still to come."""


class Boundary(Enum):
    """The end of a micro-batch after which the optimizer step goes on: another job may have its turn."""

    MICRO_BATCH = "micro_batch"


Work = Generator[StepMetrics | Boundary | MicroStep, None, None]
"""Yields the next micro-step's kind in the middle of a micro-batch, a `Boundary`, or what an optimizer step came to."""


class Run:
    """A job in memory. `advance` is the only thing that moves it."""

    def __init__(
        self,
        spec: JobSpec,
        corpus: Corpus,
        plan: BatchPlan,
        learner: Learner,
        stepper: Stepper,
        *,
        way: Way,
        device: torch.device,
        clock: Callable[[], float],
    ) -> None:
        self.spec, self.plan, self.learner = spec, plan, learner
        self.progress = Progress()
        self.best: LoraWeights | None = None
        """fp32 weights of the best evaluation; kept where early stopping is on."""
        self.next_micro_step = MicroStep.BEGIN
        self.micro_steps_done = 0
        """In the last slice."""
        self.mid_step = False
        """Some of an optimizer step's micro-batches are done, or of its evaluation's."""
        self._corpus, self._stepper, self._way, self._device, self._clock = corpus, stepper, way, device, clock
        self._validation = plan.validation()
        self._seconds, self._began = 0.0, 0.0
        self._work = self._steps()

    @property
    def finished(self) -> bool:
        """Nothing is left to learn: all steps are done, or the last evaluations brought nothing."""
        patience = self.spec.training.early_stopping_patience
        gone_stale = patience is not None and self.progress.evaluations_without_gain >= patience
        return self.progress.pending is None and (self.progress.step >= self.plan.total_steps or gone_stale)

    @property
    def mid_batch(self) -> bool:
        """A micro-batch is suspended."""
        return self.next_micro_step is not MicroStep.BEGIN

    def advance(self, micro_steps: int | None) -> StepMetrics | None:
        """Run `micro_steps` micro-steps, fewer if one of another kind comes next, or (None) to the end of the micro-batch; never beyond it.

        Returns the metrics of an optimizer step that is now done, evaluation included. Raises `NonFiniteLoss`.
        """
        self._began = self._clock()
        try:
            came = self._advance(micro_steps)
            if self._device.type == "cuda":  # a slice takes as long as the device needs for it, not as long as to ask
                torch.cuda.synchronize(self._device)
            return came
        finally:
            self._seconds += self._clock() - self._began

    def _advance(self, micro_steps: int | None) -> StepMetrics | None:
        kind, self.micro_steps_done = self.next_micro_step, 0
        while micro_steps is None or (self.micro_steps_done < micro_steps and self.next_micro_step is kind):
            came = next(self._work, None)
            if came is None:  # the job had finished before: no micro-step
                return None
            self.micro_steps_done += 1
            self.next_micro_step = came if isinstance(came, MicroStep) else MicroStep.BEGIN
            self.mid_step = not isinstance(came, StepMetrics)
            if not isinstance(came, MicroStep):
                return came if isinstance(came, StepMetrics) else None
        return None

    def abandon(self) -> None:
        """Give up the optimizer step that is under way: its gradients are formed again."""
        self._work.close()
        self.learner.clear()
        self.next_micro_step, self.mid_step = MicroStep.BEGIN, False
        self._work = self._steps()

    def final_weights(self) -> LoraWeights:
        """What the job learned, fp32: the best evaluation's weights where early stopping is on, else the last."""
        return self.best or self.learner.masters()

    def _steps(self) -> Work:
        while not self.finished:
            if self.progress.pending is None:
                self._seconds, self._began = 0.0, self._clock()
                yield from self._step()
                if self._evaluation_is_due():
                    yield Boundary.MICRO_BATCH
            if self._evaluation_is_due():
                yield from self._evaluate()
            yield self._settle()

    def _step(self) -> Work:
        """One optimizer step: the gradients of its micro-batches summed, then the update."""
        step = self.progress.step
        planned = self.plan.step(step)
        self.learner.clear()
        nll = torch.zeros((), dtype=torch.float64, device=self._device)
        tokens = targets = 0
        for micro, indices in enumerate(planned.micro_batches):
            if micro:
                yield Boundary.MICRO_BATCH
            rows = pack_rows(self._corpus, indices, self._device)
            lora = self._batch(rows, self._dropout(step, micro))
            last = MicroStep.UPDATE if micro + 1 == len(planned.micro_batches) else MicroStep.BACKWARD
            nll += yield from self._stepper.learn(rows, lora, self.learner.leaves, self.learner.grads, last=last)
            tokens += rows.tokens
            targets += rows.targets
        loss = self._finite(nll / targets, "loss")
        with disk_errors():
            failpoint("finetune.mid_step")
        rate = learning_rate(self.spec.training, step, self.plan.total_steps)
        norm = self.learner.update(targets=targets, learning_rate=rate)
        metrics = StepMetrics(
            step=step + 1,
            total_steps=self.plan.total_steps,
            epoch=planned.epoch,
            loss=loss,
            learning_rate=rate,
            grad_norm=norm,
            tokens=tokens,
            target_tokens=targets,
            seconds=self._seconds + self._clock() - self._began,
        )
        trained = self.progress.trained_tokens + tokens
        self.progress = msgspec.structs.replace(
            self.progress, step=step + 1, trained_tokens=trained, last_loss=loss, pending=metrics
        )

    def _evaluation_is_due(self) -> bool:
        step = self.progress.step
        return bool(self._validation) and (step % self.spec.training.eval_steps == 0 or step == self.plan.total_steps)

    def _evaluate(self) -> Work:
        """The mean NLL of the held-back rows, into the pending metrics."""
        nll, targets = torch.zeros((), dtype=torch.float64, device=self._device), 0
        for micro, indices in enumerate(self._validation):
            if micro:
                yield Boundary.MICRO_BATCH
            rows = pack_rows(self._corpus, indices, self._device)
            nll += yield from self._stepper.measure(rows, self._batch(rows, None))
            targets += rows.targets
        loss = self._finite(nll / targets, "validation loss")
        assert self.progress.pending is not None, "an evaluation without a step"
        pending = msgspec.structs.replace(self.progress.pending, valid_loss=loss)
        self.progress = msgspec.structs.replace(self.progress, pending=pending)

    def _settle(self) -> StepMetrics:
        """The pending metrics, now complete; notes whether the evaluation brought anything."""
        metrics = self.progress.pending
        assert metrics is not None, "nothing to report"
        best, stale = self.progress.best_valid_loss, self.progress.evaluations_without_gain
        if metrics.valid_loss is not None and self.spec.training.early_stopping_patience is not None:
            if best is None or metrics.valid_loss < best:
                best, stale = metrics.valid_loss, 0
                self.best = self.learner.copied_masters()
            else:
                stale += 1
        self.progress = msgspec.structs.replace(
            self.progress, best_valid_loss=best, evaluations_without_gain=stale, pending=None
        )
        return metrics

    def _finite(self, value: torch.Tensor, name: str) -> float:
        number = float(value)
        if not math.isfinite(number):
            raise NonFiniteLoss(f"the {name} is not finite at step {self.progress.step}; try a lower learning rate")
        return number

    def _batch(self, rows: PackedRows, dropout: DropoutSpec | None) -> LoraBatch:
        return LoraBatch(Segments((0, rows.tokens), (0,)), (self.learner.weights(),), self._way, dropout)

    def _dropout(self, step: int, micro: int) -> DropoutSpec | None:
        """Masks depend on the job's seed and the place in the job alone: a resumed job drops the same elements."""
        p = self.spec.lora.dropout
        return DropoutSpec(p, (self.spec.training.seed << 96) | (step << 32) | micro) if p > 0 else None
