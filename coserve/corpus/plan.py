"""The plan of a job, a pure function of its corpus and settings: what each optimizer step reads. No torch.

The same plan comes out after a restart: which rows are held back for validation and the order of each epoch depend on
the job's seed alone.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coserve.cancellation import unchecked
from coserve.corpus.packing import pack
from coserve.errors import InvalidRequest
from coserve.types import Schedule, TrainingSettings

DEFAULT_EPOCHS = 3.0
"""For settings that give neither `epochs` nor `steps`."""

MAX_STEPS = 1_000_000
MAX_EPOCHS = 1000
MAX_ROW_VISITS = 100_000_000
"""Rows times epochs: the plan orders them all before the job starts."""

AT_ONCE = 2048
"""Rows that may be ordered or packed between two ticks; what concerns more of them belongs on a thread."""

Ints = npt.NDArray[np.int64]


def check_training(training: TrainingSettings) -> None:
    """Raises `InvalidRequest` with the field for settings that make no sense."""
    if training.epochs is not None and training.steps is not None:
        raise InvalidRequest("expected epochs or steps, got both", field="training.steps")
    at_least: dict[str, float] = {
        "steps": 1,
        "batch_tokens": 1,
        "micro_batch_tokens": 1,
        "max_length": 2,
        "warmup_steps": 0,
        "max_grad_norm": 0,
        "weight_decay": 0,
        "early_stopping_patience": 1,
        "eval_steps": 1,
        "checkpoint_steps": 1,
        "seed": 0,
    }
    for name, least in at_least.items():
        value = getattr(training, name)
        if value is not None and not least <= value < 2**62:
            raise InvalidRequest(
                f"expected at least {least:g} and less than 2^62, got {value}", field=f"training.{name}"
            )
    if training.steps is not None and training.steps > MAX_STEPS:
        raise InvalidRequest(f"expected at most {MAX_STEPS}, got {training.steps}", field="training.steps")
    if training.epochs is not None and not 0 < training.epochs <= MAX_EPOCHS:
        raise InvalidRequest(
            f"expected more than 0 and at most {MAX_EPOCHS}, got {training.epochs}", field="training.epochs"
        )
    if not 0 < training.learning_rate <= 100:
        raise InvalidRequest(
            f"expected more than 0 and at most 100, got {training.learning_rate}", field="training.learning_rate"
        )
    for name in ("beta1", "beta2", "validation_split"):
        if not 0 <= getattr(training, name) < 1:
            got = getattr(training, name)
            raise InvalidRequest(f"expected at least 0 and less than 1, got {got}", field=f"training.{name}")
    if not 0 < training.eps <= 1:
        raise InvalidRequest(f"expected more than 0 and at most 1, got {training.eps}", field="training.eps")
    if training.early_stopping_patience is not None and training.validation_split == 0:
        raise InvalidRequest("expected a validation_split above 0", field="training.early_stopping_patience")


def longest_row(training: TrainingSettings, context: int, micro_batch_tokens: int) -> int:
    """Tokens that a row of the job may have: its `max_length`, the base's context, one micro-batch."""
    if training.max_length is not None and training.max_length > context:
        raise InvalidRequest(
            f"expected at most the base's context of {context} tokens, got {training.max_length}",
            field="training.max_length",
        )
    return min(training.max_length or context, context, micro_batch_limit(training, micro_batch_tokens))


def micro_batch_limit(training: TrainingSettings, micro_batch_tokens: int) -> int:
    """Tokens of one forward: what the job asks for, but no more than the engine allows (`micro_batch_tokens`)."""
    return min(training.micro_batch_tokens or micro_batch_tokens, micro_batch_tokens)


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step: rows of the corpus by micro-batch, and the epochs done once it is through."""

    micro_batches: tuple[tuple[int, ...], ...]
    epoch: float


class Plan:
    """What a job reads, and when. `check`, everywhere: called now and then, on the thread that works; may raise."""

    def __init__(
        self,
        lengths: Ints,
        training: TrainingSettings,
        micro_batch_tokens: int,
        check: Callable[[], None] = unchecked,
    ) -> None:
        """For rows of `lengths` tokens (S); `micro_batch_tokens` is what the engine allows.

        An epoch is cut into as many optimizer steps as it holds `batch_tokens`, rounded up, all of about one size (no
        small rest at its end): its share of the epoch, and at most one row more. No step reaches into the next epoch. A
        fractional epoch ends after its share of steps.
        Raises `InvalidRequest` for settings that make no sense, alone or for this corpus.
        """
        check_training(training)
        self._lengths, self._training = lengths, training
        self._limit = micro_batch_limit(training, micro_batch_tokens)
        self._train, held = _split(len(lengths), training)
        self._validation = self._packed(held, check)
        self._starts = [0]
        self._epoch: tuple[int, Ints, Ints] | None = None
        self._ahead: tuple[int, StepPlan] | None = None
        if training.steps is not None:
            self.total_steps = training.steps
            return
        epochs = training.epochs or DEFAULT_EPOCHS
        if epochs * len(lengths) > MAX_ROW_VISITS:
            raise InvalidRequest(f"expected at most {MAX_ROW_VISITS} rows over all epochs", field="training.epochs")
        whole = math.ceil(epochs)
        self._extend(whole, check)
        last = self._starts[whole] - self._starts[whole - 1]
        self.total_steps = self._starts[whole - 1] + max(1, round(last * (epochs - (whole - 1))))

    def prepared(self, step: int) -> bool:
        """Whether `step(step)` concerns few rows only; otherwise `prepare` it on a thread, before."""
        if step >= self.total_steps:
            return True
        if len(self._train) <= AT_ONCE:
            return step <= self._starts[-1]
        if self._epoch is None or not self._starts[self._epoch[0]] <= step < self._starts[self._epoch[0] + 1]:
            return False
        start, end = self._bounds(step)
        return end - start <= AT_ONCE or (self._ahead is not None and self._ahead[0] == step)

    def prepare(self, step: int, check: Callable[[], None] = unchecked) -> None:
        """Order the rows of the step's epoch and pack those of the step."""
        while self._starts[-1] <= step:
            self._extend(len(self._starts), check)
        epoch = bisect.bisect_right(self._starts, step) - 1
        if self._epoch is None or self._epoch[0] != epoch:
            order = self._order(epoch)
            check()
            self._epoch = epoch, order, self._cuts(order)
        if self._ahead is None or self._ahead[0] != step:
            order, (start, end) = self._epoch[1], self._bounds(step)
            self._ahead = step, StepPlan(self._packed(order[start:end], check), epoch + end / len(order))

    def step(self, step: int) -> StepPlan:
        """Optimizer step `step` (from 0)."""
        assert 0 <= step < self.total_steps, f"expected a step below {self.total_steps}, got {step}"
        self.prepare(step)
        assert self._ahead is not None, "the step was just packed"
        return self._ahead[1]

    def validation(self) -> tuple[tuple[int, ...], ...]:
        """The held-back rows by micro-batch; none without a `validation_split`."""
        return self._validation

    def _bounds(self, step: int) -> tuple[int, int]:
        """Where the step starts and ends in its epoch's order, which is known."""
        assert self._epoch is not None, "the epoch was just ordered"
        epoch, _, cuts = self._epoch
        place = step - self._starts[epoch]
        return int(cuts[place]), int(cuts[place + 1])

    def learning_rate(self, step: int) -> float:
        """Rate of optimizer step `step` (from 0): a linear rise over `warmup_steps`, then the schedule down to 0."""
        peak, warmup = self._training.learning_rate, self._training.warmup_steps
        if step < warmup:
            return peak * (step + 1) / (warmup + 1)
        done = (step - warmup) / max(1, self.total_steps - warmup)
        match self._training.schedule:
            case Schedule.CONSTANT:
                return peak
            case Schedule.LINEAR:
                return peak * (1 - done)
            case Schedule.COSINE:
                return peak * 0.5 * (1 + math.cos(math.pi * done))

    def _packed(self, rows: Ints, check: Callable[[], None]) -> tuple[tuple[int, ...], ...]:
        """The rows by micro-batch."""
        indices: list[int] = rows.tolist()
        sizes: list[int] = self._lengths[rows].tolist()
        packed: list[tuple[int, ...]] = []
        for one in pack(sizes, self._limit, check):
            check()
            packed.append(tuple([indices[i] for i in one]))
        return tuple(packed)

    def _extend(self, epochs: int, check: Callable[[], None]) -> None:
        """Know where the first `epochs` epochs end."""
        for epoch in range(len(self._starts) - 1, epochs):
            check()
            self._starts.append(self._starts[-1] + len(self._cuts(self._order(epoch))) - 1)

    def _order(self, epoch: int) -> Ints:
        return self._train[_random(self._training.seed, epoch + 1).permutation(len(self._train))]

    def _cuts(self, order: Ints) -> Ints:
        """Where each step starts in `order`, and where the last one ends."""
        ends = np.cumsum(self._lengths[order])
        steps = -(-int(ends[-1]) // self._training.batch_tokens)
        if steps >= len(order):
            return np.arange(len(order) + 1)
        shares = ends[-1] * np.arange(1, steps) / steps
        inner = np.unique(np.searchsorted(ends, shares, side="left") + 1)
        return np.concatenate(([0], inner[inner < len(order)], [len(order)]))


def _split(rows: int, training: TrainingSettings) -> tuple[Ints, Ints]:
    """Rows to learn and rows to hold back, both ascending."""
    if training.validation_split == 0:
        return np.arange(rows), np.arange(0)
    held = min(max(1, round(rows * training.validation_split)), rows - 1)
    if held < 1:
        raise InvalidRequest(
            f"expected at least 2 rows to hold some back, got {rows}", field="training.validation_split"
        )
    order = _random(training.seed, 0).permutation(rows)
    return np.sort(order[held:]), np.sort(order[:held])


def _random(seed: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([seed, stream], np.uint64)))
