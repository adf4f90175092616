"""The training loop of one job, as a generator that asks for the sums of micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from zlib import crc32

import msgspec
import torch
from torch import Tensor

from coserve.admission.treatment import Treatment
from coserve.corpus.batch_plan import BatchPlan
from coserve.corpus.lr_schedule import learning_rate
from coserve.corpus.tokenized import Corpus
from coserve.errors import NonFiniteLoss
from coserve.finetune.embedding_noise import EmbeddingNoise
from coserve.finetune.losses.formulas import perplexity
from coserve.finetune.memory_limits import MemoryLimits, MicroBatches
from coserve.finetune.micro_batch import MicroBatch
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.progress import TrainingProgress
from coserve.model.dropout import DropoutSpec
from coserve.model.lora import LoraWeights
from coserve.state.durable import disk_errors
from coserve.state.failpoints import failpoint
from coserve.step_metrics import Rewards, StepMetrics
from coserve.types import JobSpec, MicroStep


class Boundary(Enum):
    """End of a micro-batch within an optimizer step or evaluation: another job may run."""

    MICRO_BATCH = "micro_batch"


Event = MicroBatch | MicroStep | Boundary | StepMetrics
"""What a loop is suspended for: a micro-batch that is to be computed, `MicroStep.OPTIMIZER` ahead of an update of the weights, a
`Boundary`, or the metrics of a finished optimizer step."""
Events = Generator[Event, Tensor | None, None]
"""A `MicroBatch` is answered with its sums (fp64, (2), of a DPO loss (5)): as `MicroBatchRunner.forward_backward`."""
_Asking = Generator[Event, Tensor | None, Tensor]


class SliceTimer:
    """Seconds spent in slices since the last `restart`; the pauses between slices do not count."""

    def __init__(self, clock: Callable[[], float], *, overlapped: bool = False) -> None:
        """`overlapped`: slices are only launched, and the device works on between two of them: pauses count."""
        self._clock, self._overlapped, self._before, self._began = clock, overlapped, 0.0, 0.0

    @contextmanager
    def slice(self) -> Iterator[None]:
        if self._overlapped:
            yield
            return
        self._began = self._clock()
        try:
            yield
        finally:
            self._before += self._clock() - self._began

    def restart(self) -> None:
        """Call inside a slice."""
        self._before, self._began = 0.0, self._clock()

    def seconds(self) -> float:
        """Call inside a slice."""
        return self._before + self._clock() - self._began


class TrainingLoop:
    """Optimizer steps, evaluations and early stopping of one job. `progress` is up to date whenever `run` is suspended, but for an update of
    the weights that is done in part: it counts once it is done, by `run` or by `finish_update`."""

    def __init__(
        self,
        spec: JobSpec,
        corpus: Corpus,
        plan: BatchPlan,
        optimizer: AdapterOptimizer,
        *,
        device: torch.device,
        timer: SliceTimer,
        teacher: LoraWeights | None = None,
        check_peers: Callable[[], None] = lambda: None,
        overlapped: bool = False,
    ) -> None:
        """`teacher`: this rank's part of the adapter that `spec.teacher` names, in the base's dtype. `check_peers` is called before
        results of collectives are used for good; it raises if another rank has failed. `overlapped`: slices are only launched;
        what the device computes is read in a micro-step of its own (`MicroStep.RESULT`)."""
        self._overlapped = overlapped
        self.spec, self.plan, self.optimizer = spec, plan, optimizer
        self.progress = TrainingProgress()
        self._corpus, self._device, self._timer = corpus, device, timer
        self._teacher, self._check_peers = teacher, check_peers
        self._beta = None if spec.training.loss is None else spec.training.loss.beta
        self._validation_rows = plan.validation()
        self._limits = MemoryLimits(plan.lengths, len(optimizer.trainable))
        self._treatment = self._limits.treatment
        """Of all micro-batches of the step or evaluation in progress."""
        self._finish: Callable[[], None] | None = None
        """Does the rest of the update that `run` is suspended in."""
        self._updating = False
        """An update has begun and is not done: some weights may be new and others old."""
        self._rows_in_progress: tuple[int, ...] | None = None
        """Rows of the micro-batch that is being computed; None: between two steps, and in the optimizer's update."""
        self._next: tuple[int, ...] | None = None
        """Rows of the next micro-batch, while suspended between two of one optimizer step."""

    @property
    def finished(self) -> bool:
        """All steps are done, or early stopping ended the job."""
        patience = self.spec.training.early_stopping_patience
        stopped = patience is not None and self.progress.evaluations_without_gain >= patience
        return self.progress.pending is None and (self.progress.step >= self.plan.total_steps or stopped)

    def limit_memory(self, treatment: Treatment | None) -> None:
        """From the next optimizer step or evaluation on, also one that begins again: see `MemoryLimits.plan`."""
        self._limits.plan(treatment)

    def lower_memory(self) -> str | None:
        """Memory ran out since `run` was last suspended: compute smaller micro-batches from now on.

        Returns what changes, for the user; None: it cannot go on. An update of the weights that failed is never
        repeated: it may have changed some of them.
        """
        rows, recomputed = self._rows_in_progress, self._treatment.recomputed
        return None if rows is None else self._limits.lower(rows, recomputed)

    def finish_update(self) -> None:
        """Do the rest of the update that `run` is suspended in, at once: the step counts. Nothing happens elsewhere. If it raises, or
        if `run` is closed within the update without it, the weights are lost (`check_weights`)."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def check_weights(self) -> None:
        """Raises `RuntimeError` where an update of the weights has failed or was dropped half-way: they are those of no step."""
        if self._updating:
            raise RuntimeError(f"the update after step {self.progress.step} was not finished: its weights are lost")

    @property
    def position(self) -> int:
        """A digest of how far the job is: its finished steps and evaluations, and the micro-batch that is being computed."""
        done = (self.progress.step, self.progress.pending is None)
        return crc32(repr((done, self._rows_in_progress)).encode())

    @property
    def tokens_in_progress(self) -> int:
        """Tokens of the micro-batch that is being computed."""
        return self._limits.size(self._rows_in_progress or ())

    @property
    def next_rows(self) -> tuple[int, ...] | None:
        """Rows of the micro-batch that comes next, at the end of another: None if it cannot share a forward with other jobs'. Such
        are evaluations, micro-batches with a teacher or a DPO loss, and those that recompute their layers for lack of memory.

        Cheap where the step is prepared (`BatchPlan.prepared`).
        """
        own_loss = self._teacher is not None or self._beta is not None
        treatment = self._limits.treatment if self._next is None else self._treatment
        if self.progress.pending is not None or self.finished or own_loss or treatment.recomputes:
            return None
        return self._next or self._limits.cut(self.plan.step(self.progress.step).micro_batches)[0]

    def size(self, rows: Sequence[int]) -> int:
        """Tokens of these rows."""
        return self._limits.size(rows)

    def run(self) -> Events:
        """Continue from `progress` to the end. Raises `NonFiniteLoss`."""
        self._next = None
        return self._run()

    def _run(self) -> Events:
        self.check_weights()
        while not self.finished:
            if self.progress.pending is None:
                self._timer.restart()
                if self._teacher is not None and self._validation_rows and self.progress.step == 0:
                    yield from self._evaluate_start()
                yield from self._optimizer_step()
                if self._evaluation_is_due():
                    yield Boundary.MICRO_BATCH
            if self._evaluation_is_due():
                yield from self._evaluate_step()
            yield self._finish_step()

    def _optimizer_step(self) -> Events:
        """Sum the gradients of the step's micro-batches, then update the weights."""
        step = self.progress.step
        batches = self.plan.step(step)
        self.optimizer.zero_grad()
        summed = self._zero_sums()
        tokens = targets = denominator = 0
        for micro, indices in enumerate(self._cut(batches.micro_batches)):
            if micro:
                self._next = indices
                yield Boundary.MICRO_BATCH
                self._next = None
            summed += yield from self._computed(indices, (step << 32) | micro)
            tokens += self.size(indices)
            targets += self._targets(indices)
            denominator += self._denominator(indices)
        yield MicroStep.OPTIMIZER
        norm_and_sums = torch.cat((self.optimizer.divide_grads(denominator).double().view(1), summed))
        norm, *sums = yield from self._read(norm_and_sums)  # the step's only synchronisation
        loss, accuracy, *rewards = _means(sums, denominator, targets)
        self._check_peers()  # before the weights change
        self._check_finite(loss, "loss")
        self._check_finite(norm, "norm of the gradients")
        with disk_errors():
            failpoint("finetune.mid_step")
        rate = learning_rate(self.spec.training, step, self.plan.total_steps)
        self._rows_in_progress = None
        metrics = StepMetrics(
            step=step + 1,
            total_steps=self.plan.total_steps,
            epoch=batches.epoch,
            loss=loss,
            learning_rate=rate,
            grad_norm=norm,
            tokens=tokens,
            target_tokens=targets,
            seconds=0.0,
            valid_loss_before=self.progress.valid_loss_before,
            token_accuracy=accuracy,
            perplexity=self._perplexity(loss),
            rewards=_rewards(rewards),
        )
        yield from self._update(norm, metrics)

    def _update(self, norm: float, metrics: StepMetrics) -> Events:
        """Update the weights, then `progress`. Between two slices `finish_update` may take over."""
        slices = self.optimizer.slices(norm, metrics.learning_rate)
        self._updating = True
        try:
            for _ in slices:
                self._finish = partial(self._finish_at_once, slices, metrics, self._timer.seconds())
                yield MicroStep.OPTIMIZER
        finally:
            self._finish = None
        self._updated(metrics, self._timer.seconds())

    def _finish_at_once(self, slices: Iterator[None], metrics: StepMetrics, seconds: float) -> None:
        for _ in slices:
            pass
        self._updated(metrics, seconds)

    def _updated(self, metrics: StepMetrics, seconds: float) -> None:
        metrics = msgspec.structs.replace(
            metrics, seconds=seconds, tokens_per_second=metrics.tokens / seconds if seconds > 0 else None
        )
        self.progress = msgspec.structs.replace(
            self.progress,
            step=metrics.step,
            trained_tokens=self.progress.trained_tokens + metrics.tokens,
            last_loss=metrics.loss,
            pending=metrics,
        )
        self._updating = False

    def _evaluation_is_due(self) -> bool:
        step = self.progress.step
        due = step % self.spec.training.eval_steps == 0 or step == self.plan.total_steps
        return due and bool(self._validation_rows)

    def _evaluate_start(self) -> Events:
        """Keep the validation loss before the first step, unless an abandoned attempt at that step has; with early stopping, the weights too."""
        if self.progress.valid_loss_before is None:
            loss, *_ = yield from self._validation()
            best = None if self.spec.training.early_stopping_patience is None else loss
            if best is not None:
                self.optimizer.keep_best()
            self.progress = msgspec.structs.replace(self.progress, valid_loss_before=loss, best_valid_loss=best)
            yield Boundary.MICRO_BATCH

    def _evaluate_step(self) -> Events:
        """Add the validation's results to the pending metrics."""
        loss, accuracy, *rewards = yield from self._validation()
        assert self.progress.pending is not None, "an evaluation follows a step"
        pending = msgspec.structs.replace(
            self.progress.pending,
            valid_loss=loss,
            valid_token_accuracy=accuracy,
            valid_perplexity=self._perplexity(loss),
            valid_rewards=_rewards(rewards),
        )
        self.progress = msgspec.structs.replace(self.progress, pending=pending)

    def _validation(self) -> Generator[Event, Tensor | None, list[float]]:
        """Return the mean loss of the validation rows, their token accuracy, and of a DPO loss the other means."""
        summed, targets, denominator = self._zero_sums(), 0, 0
        for micro, indices in enumerate(self._cut(self._validation_rows)):
            if micro:
                yield Boundary.MICRO_BATCH
            summed += yield from self._computed(indices, None)
            targets += self._targets(indices)
            denominator += self._denominator(indices)
        self._rows_in_progress = None
        sums = yield from self._read(summed)
        means = _means(sums, denominator, targets)
        self._check_finite(means[0], "validation loss")
        return means

    def _cut(self, micro_batches: MicroBatches) -> MicroBatches:
        """At the start of an optimizer step or evaluation: its micro-batches, all computed as is planned now."""
        self._treatment = self._limits.treatment
        return self._limits.cut(micro_batches)

    def _zero_sums(self) -> Tensor:
        return torch.zeros(2 if self._beta is None else 5, dtype=torch.float64, device=self._device)

    def _perplexity(self, loss: float) -> float | None:
        """None: the loss is no likelihood."""
        return perplexity(loss) if self._teacher is None and self._beta is None else None

    def _read(self, values: Tensor) -> Generator[Event, Tensor | None, list[float]]:
        """The values of a tensor on the device, which the host waits for unless slices are only launched."""
        if self._overlapped:
            yield MicroStep.RESULT
        found: list[float] = values.tolist()
        return found

    def _finish_step(self) -> StepMetrics:
        """Return the pending metrics, now complete, and update early stopping."""
        metrics = self.progress.pending
        assert metrics is not None, "a step was done"
        best, stale = self.progress.best_valid_loss, self.progress.evaluations_without_gain
        if metrics.valid_loss is not None and self.spec.training.early_stopping_patience is not None:
            if best is None or metrics.valid_loss < best:
                best, stale = metrics.valid_loss, 0
                self.optimizer.keep_best()
            else:
                stale += 1
        self.progress = msgspec.structs.replace(
            self.progress, best_valid_loss=best, evaluations_without_gain=stale, pending=None
        )
        return msgspec.structs.replace(metrics, best_valid_loss=best)

    def _check_finite(self, value: float, name: str) -> None:
        if not math.isfinite(value):
            when, advice = f"at step {self.progress.step}", "try a lower learning rate"
            if self.progress.step == 0 and self.spec.init_from is not None:
                when = "before the first update"
                advice = f"continue_from names {self.spec.init_from}: its weights are too large"
            raise NonFiniteLoss(f"the {name} is not finite {when}; {advice}")

    def _computed(self, rows: tuple[int, ...], place: int | None) -> _Asking:
        """Ask for a micro-batch; return its sums. `place`: its step and its number there; None: it is an evaluation, without dropout and
        noise. They are functions of the job's seed and of the place alone: a resumed job draws the same."""
        p, alpha = self.spec.lora.dropout, self.spec.training.neftune_alpha
        seed = (self.spec.training.seed << 96) | (place or 0)
        learns = place is not None
        self._rows_in_progress = rows
        sums = yield MicroBatch(
            self._corpus,
            rows,
            self.size(rows),
            self.optimizer.weights(),
            self.optimizer.trainable,
            self.optimizer.grads,
            learns=learns,
            dropout=DropoutSpec(p, seed) if learns and p > 0 else None,
            noise=EmbeddingNoise(alpha, seed) if learns and alpha is not None else None,
            teacher=self._teacher,
            beta=self._beta,
            recomputed=self._treatment.recomputed,
            partly=self._treatment.partly,
            for_compiled=self._treatment.compiled,
        )
        assert sums is not None, "expected the micro-batch's sums"
        return sums

    def _denominator(self, rows: Sequence[int]) -> int:
        """Over what the loss of these rows is a mean: their target tokens, or the pairs that they are."""
        return self._targets(rows) if self._beta is None else len(rows)

    def _targets(self, rows: Sequence[int]) -> int:
        """Target tokens of these rows."""
        return sum(int(self._corpus.row(row)[1].sum()) for row in rows)


def _means(sums: Sequence[float], denominator: int, targets: int) -> list[float]:
    """Of a loss over `denominator`, of predicted targets, and of what else is over `denominator`."""
    loss, predicted, *others = sums
    return [loss / denominator, predicted / targets, *(other / denominator for other in others)]


def _rewards(means: Sequence[float]) -> Rewards | None:
    """Of the means of `losses.chunked.Preference`'s sums beyond loss and accuracy; None where there are none."""
    if not means:
        return None
    chosen, rejected, wins = means
    return Rewards(chosen=chosen, rejected=rejected, margin=chosen - rejected, accuracy=wins)
