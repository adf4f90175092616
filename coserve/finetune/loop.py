"""The steps of one job, as a coroutine over its `TrainingSession`: epochs, validation, early stopping."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from coserve.core.errors import NonFiniteLoss
from coserve.core.training.jobs import JobSpec
from coserve.core.training.settings import Schedule, TrainingSettings
from coserve.core.training.step_metrics import Rewards, StepMetrics
from coserve.core.types import AdapterRef
from coserve.data.corpus.batch import Batch, corpus_batch
from coserve.data.corpus.batch_plan import BatchPlan
from coserve.data.corpus.tokenized import Corpus
from coserve.data.documents.encoder import encoded_tokens
from coserve.finetune.checkpoint import TrainingProgress
from coserve.finetune.encoder import with_encoder
from coserve.finetune.losses.formulas import perplexity
from coserve.finetune.losses.loss import Loss
from coserve.finetune.memory_limits import MemoryLimits, MicroBatches
from coserve.finetune.sessions.session import FinishUpdate, TrainingSession, suspended
from coserve.state.durable import disk_errors
from coserve.state.failpoints import failpoint


class TrainingLoop:
    """Optimizer steps, evaluations and early stopping of one job. `progress` is up to date whenever `run` is suspended,
    except during an update of the weights."""

    def __init__(self, spec: JobSpec, corpus: Corpus, plan: BatchPlan, session: TrainingSession, loss: Loss) -> None:
        self.spec, self.plan, self.session, self._loss = spec, plan, session, loss
        self.progress = TrainingProgress()
        self._corpus = corpus
        self._validation_rows = plan.validation()
        self.limits = MemoryLimits(plan.lengths, len(session.optimizer.trainable), encoded_tokens(spec))
        self._recompute_plan = self.limits.recompute_plan
        """Recompute plan of all micro-batches of the step or evaluation in progress."""
        self._rows_in_progress: tuple[int, ...] | None = None
        """Rows of the micro-batch being computed; None: between two steps, and during the optimizer's update."""
        self._next: tuple[int, ...] | None = None
        """Rows of the next micro-batch, while suspended between two of one step."""

    @property
    def result(self) -> AdapterRef:
        """The adapter version that the job publishes on success."""
        return AdapterRef(self.spec.adapter, self.spec.version)

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or early stopping ended the job."""
        patience = self.spec.training.early_stopping_patience
        stopped = patience is not None and self.progress.evaluations_without_gain >= patience
        return self.progress.pending is None and (self.progress.step >= self.plan.total_steps or stopped)

    def lower_memory(self) -> str | None:
        """React to an out-of-memory since `run` was last suspended: compute smaller micro-batches from now on.

        Returns what changes, for the user; None if the job cannot continue. An update of the weights that failed is
        never retried: some weights may have changed.
        """
        rows, recomputed = self._rows_in_progress, self._recompute_plan.recomputed
        return None if rows is None else self.limits.lower(rows, recomputed)

    @property
    def tokens_in_progress(self) -> int:
        """Tokens of the micro-batch being computed."""
        return self.limits.size(self._rows_in_progress or ())

    @property
    def next_rows(self) -> tuple[int, ...] | None:
        """Rows of the next micro-batch, at the end of another. None if it cannot share a forward with other jobs: an
        evaluation, a micro-batch with a teacher or a preference loss, or one that recomputes layers for lack of memory.

        Cheap if the step is prepared (`BatchPlan.prepared`).
        """
        recompute_plan = self.limits.recompute_plan if self._next is None else self._recompute_plan
        if self.progress.pending is not None or self.finished or recompute_plan.recomputes or not self._loss.shares:
            return None
        return self._next or self.limits.cut(self.plan.step(self.progress.step).micro_batches)[0]

    async def run(self) -> None:
        """Train from `progress` to the end. Raises `NonFiniteLoss`, and like `TrainingSession.check_weights`."""
        self._next = None
        self.session.check_weights()
        while not self.finished:
            if self.progress.pending is None:
                self.session.timer.restart()
                if self._loss.teacher is not None and self._validation_rows and self.progress.step == 0:
                    await self._evaluate_start()
                await self._optimizer_step()
                if self._evaluation_is_due():
                    await self.session.next_micro_batch()
            if self._evaluation_is_due():
                await self._evaluate_step()
            await suspended(self._finish_step())

    async def _optimizer_step(self) -> None:
        """Sum the gradients of the step's micro-batches, then update the weights."""
        step, session = self.progress.step, self.session
        batches = self.plan.step(step)
        session.zero_grad()
        summed = self._zero_sums()
        tokens = targets = denominator = 0
        for micro, rows in enumerate(self._cut(batches.micro_batches)):
            if micro:
                self._next = rows
                await session.next_micro_batch()
                self._next = None
            self._rows_in_progress, batch = rows, self._batch(rows)
            draw = (step << 32) | micro
            summed += (await session.forward_backward(batch, self._loss, self._recompute_plan, draw=draw)).sums
            tokens += batch.tokens
            targets += batch.targets
            denominator += self._denominator(batch)
        rate = learning_rate(self.spec.training, step, self.plan.total_steps)
        found: StepMetrics | None = None

        def accept(norm: float, sums: list[float]) -> None:
            nonlocal found
            loss, accuracy, *rewards = _means(sums, denominator, targets)
            self._check_finite(loss, "loss")
            self._check_finite(norm, "norm of the gradients")
            with disk_errors():
                failpoint("finetune.mid_step")
            self._rows_in_progress = None
            found = StepMetrics(
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

        try:
            await session.optim_step(rate, denominator, summed, accept)
        except FinishUpdate:
            if found is not None:
                self._updated(found)
            raise
        assert found is not None, "the step was accepted"
        self._updated(found)

    def _updated(self, metrics: StepMetrics) -> None:
        seconds = self.session.timer.seconds()
        rate = metrics.tokens / seconds if seconds > 0 else None
        self.progress = msgspec.structs.replace(
            self.progress,
            step=metrics.step,
            trained_tokens=self.progress.trained_tokens + metrics.tokens,
            pending=msgspec.structs.replace(metrics, seconds=seconds, tokens_per_second=rate),
        )

    def _evaluation_is_due(self) -> bool:
        step = self.progress.step
        due = step % self.spec.training.eval_steps == 0 or step == self.plan.total_steps
        return due and bool(self._validation_rows)

    async def _evaluate_start(self) -> None:
        """Measure the validation loss before the first step, unless an abandoned attempt has done so; with early
        stopping, keep the initial weights too."""
        if self.progress.valid_loss_before is None:
            loss, *_ = await self._validation()
            best = None if self.spec.training.early_stopping_patience is None else loss
            if best is not None:
                self.session.keep_best()
            self.progress = msgspec.structs.replace(
                self.progress, valid_loss_before=loss, best_valid_loss=best, best_step=None if best is None else 0
            )
            await self.session.next_micro_batch()

    async def _evaluate_step(self) -> None:
        """Add the validation's results to the pending metrics."""
        loss, accuracy, *rewards = await self._validation()
        assert self.progress.pending is not None, "an evaluation follows a step"
        pending = msgspec.structs.replace(
            self.progress.pending,
            valid_loss=loss,
            valid_token_accuracy=accuracy,
            valid_perplexity=self._perplexity(loss),
            valid_rewards=_rewards(rewards),
        )
        self.progress = msgspec.structs.replace(self.progress, pending=pending)

    async def _validation(self) -> list[float]:
        """Return means over the validation rows: loss, token accuracy, and with a preference loss the others of
        `Loss.sums`."""
        session, targets, denominator = self.session, 0, 0
        summed = self._zero_sums()
        for micro, rows in enumerate(self._cut(self._validation_rows)):
            if micro:
                await session.next_micro_batch()
            self._rows_in_progress, batch = rows, self._batch(rows)
            summed += (await session.forward(batch, self._loss, self._recompute_plan)).sums
            targets += batch.targets
            denominator += self._denominator(batch)
        self._rows_in_progress = None
        means = _means(await session.read(summed), denominator, targets)
        self._check_finite(means[0], "validation loss")
        return means

    def _batch(self, rows: Sequence[int]) -> Batch:
        return with_encoder(self.spec, corpus_batch(self._corpus, rows, self.spec.training))

    def _cut(self, micro_batches: MicroBatches) -> MicroBatches:
        """Fix the recompute plan for a step or evaluation, and cut its micro-batches accordingly."""
        self._recompute_plan = self.limits.recompute_plan
        return self.limits.cut(micro_batches)

    def _perplexity(self, loss: float) -> float | None:
        """Perplexity of a loss; None if the loss is no likelihood."""
        return perplexity(loss) if self._loss.shares else None

    def _finish_step(self) -> StepMetrics:
        """Return the pending metrics, now complete, and update early stopping."""
        metrics = self.progress.pending
        assert metrics is not None, "a step was done"
        best, stale = self.progress.best_valid_loss, self.progress.evaluations_without_gain
        best_step = self.progress.best_step
        if metrics.valid_loss is not None and self.spec.training.early_stopping_patience is not None:
            if best is None or metrics.valid_loss < best:
                best, best_step, stale = metrics.valid_loss, metrics.step, 0
                self.session.keep_best()
            else:
                stale += 1
        self.progress = msgspec.structs.replace(
            self.progress, best_valid_loss=best, best_step=best_step, evaluations_without_gain=stale, pending=None
        )
        return msgspec.structs.replace(metrics, best_valid_loss=best, best_step=best_step)

    def _check_finite(self, value: float, name: str) -> None:
        if not math.isfinite(value):
            when, advice = f"at step {self.progress.step}", "try a lower learning rate"
            if self.progress.step == 0 and self.spec.init_from is not None:
                when = "before the first update"
                advice = f"continue_from names {self.spec.init_from}: its weights are too large"
            raise NonFiniteLoss(f"the {name} is not finite {when}; {advice}")

    def _denominator(self, batch: Batch) -> int:
        """Denominator of the batch's mean loss: its target tokens, or with a preference loss its rows."""
        return batch.targets if self._loss.preference is None else batch.rows

    def _zero_sums(self) -> Tensor:
        return torch.zeros(self._loss.sums, dtype=torch.float64, device=self.session.device)


def _means(sums: Sequence[float], denominator: int, targets: int) -> list[float]:
    """Convert sums to means: the loss and further sums over `denominator`, predicted targets over `targets`."""
    loss, predicted, *others = sums
    return [loss / denominator, predicted / targets, *(other / denominator for other in others)]


def _rewards(means: Sequence[float]) -> Rewards | None:
    """Rewards from the further means of a preference loss (`Loss.sums`); None if there are none, or if all rows have
    the same label."""
    if not means:
        return None
    chosen, rejected, wins, *desirable = means
    if desirable:
        share = desirable[0]
        if share in (0, 1):
            return None
        chosen, rejected = chosen / share, rejected / (1 - share)
    return Rewards(chosen=chosen, rejected=rejected, margin=chosen - rejected, accuracy=wins)


def learning_rate(training: TrainingSettings, step: int, total_steps: int) -> float:
    """Return the rate of optimizer step `step` (from 0): linear warm-up over `warmup_steps`, then the schedule, down to
    0."""
    peak, warmup = training.learning_rate, training.warmup_steps
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, total_steps - warmup)
    match training.schedule:
        case Schedule.CONSTANT:
            return peak
        case Schedule.LINEAR:
            return peak * (1 - done)
        case Schedule.COSINE:
            return peak * 0.5 * (1 + math.cos(math.pi * done))
