"""The order of a job's rows: which rows each optimizer step trains on, packed first-fit into micro-batches. Pure
function of row lengths and settings. No torch.

The order depends only on the job's seed, so a restarted job reads the same rows in the same micro-batches.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coserve.core.cancellation import unchecked
from coserve.core.errors import InvalidRequest
from coserve.core.training.settings import TrainingSettings
from coserve.data.corpus.limits import check_training, micro_batch_limit

DEFAULT_EPOCHS = 3.0
"""Epochs for settings that give neither `epochs` nor `steps`."""

MAX_ROW_VISITS = 100_000_000
"""Most rows times epochs: the order of all of them is computed before the job starts."""

MAX_ROWS_ON_TICK = 2048
"""Most rows shuffled or packed on the engine's thread between two ticks; larger steps are prepared on another
thread."""

FIRST_SHARE = 1 / 3
"""Fraction of the steps that reads the rows to learn first, if there are any."""

SUM_ROWS = 1 << 16
"""Rows whose lengths are summed at once."""

Ints = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class StepBatches:
    """One optimizer step: the row indices of each micro-batch, and the epochs completed after it."""

    micro_batches: tuple[tuple[int, ...], ...]
    epoch: float


class BatchPlan:
    """The rows of each optimizer step, by micro-batch. Every `check` argument is called often, on the calling thread;
    an exception from it ends the work.

    Memory: 12 bytes a row; 40 bytes a row while an epoch is ordered; about 100 bytes for each row of the validation
    split and of the packed step.
    """

    def __init__(
        self,
        lengths: Ints,
        training: TrainingSettings,
        micro_batch_tokens: int,
        check: Callable[[], None] = unchecked,
        *,
        micro_batch_rows: int | None = None,
        rows_on_tick: int = MAX_ROWS_ON_TICK,
        first_rows: int = 0,
    ) -> None:
        """`lengths`: tokens of each row (S). `micro_batch_tokens`, `micro_batch_rows`: the engine's limits.
        `rows_on_tick`: see `MAX_ROWS_ON_TICK`. `first_rows`: the last rows of the corpus, which the first third of the
        steps reads alone, and the other steps do not read.

        An epoch has ceil(tokens / `batch_tokens`) optimizer steps of about equal size: an equal fraction of its tokens
        each, plus at most one row. No step spans two epochs. A fractional epoch ends after that fraction of its steps.
        Raises `InvalidRequest` for settings that are invalid, in general or for this corpus.
        """
        check_training(training)
        lengths = lengths.astype(np.int32, copy=False)
        self.lengths = 2 * lengths if training.mismatches else lengths
        """Tokens that each row adds to a micro-batch (S)."""
        self._training, self._rows_on_tick = training, rows_on_tick
        self._limit, self._rows = micro_batch_limit(training, micro_batch_tokens), micro_batch_rows
        self._training_rows, validation_rows = _split(len(lengths), training)
        self._validation = self._pack(validation_rows, check)
        self._epoch_starts = [0]
        """First step of each epoch computed so far, then the first step after them."""
        self._visits = [0]
        """Rows read before each of these steps."""
        self._first_steps = 0
        """Steps that read the rows to learn first."""
        self._epoch: tuple[int, Ints, Ints] | None = None
        """Cached epoch: its number, the order of its rows, and the start of each step in that order."""
        self._packed_step: tuple[int, StepBatches] | None = None
        """Cached step: the last one packed, with its number."""
        self.total_steps = training.steps or self._steps_of_epochs(training.epochs or DEFAULT_EPOCHS, check)
        first = self._training_rows >= len(lengths) - first_rows
        if first.any() and not first.all():
            self._first_steps, self._epoch_starts, self._visits = round(FIRST_SHARE * self.total_steps), [0], [0]
            self._first_rows, self._rest = self._training_rows[first], self._training_rows[~first]

    def prepared(self, step: int) -> bool:
        """Return whether `step(step)` is cheap: it is cached or touches few rows. Otherwise call `prepare` on a thread
        first."""
        if step >= self.total_steps:
            return True
        if len(self._training_rows) <= self._rows_on_tick:
            return step <= self._epoch_starts[-1]
        if (
            self._epoch is None
            or not self._epoch_starts[self._epoch[0]] <= step < self._epoch_starts[self._epoch[0] + 1]
        ):
            return False
        start, end = self._bounds(step)
        return end - start <= self._rows_on_tick or (self._packed_step is not None and self._packed_step[0] == step)

    def prepare(self, step: int, check: Callable[[], None] = unchecked) -> None:
        """Shuffle the step's epoch and pack the step's rows, and cache both."""
        while self._epoch_starts[-1] <= step:
            self._extend(len(self._epoch_starts), check)
        epoch = bisect.bisect_right(self._epoch_starts, step) - 1
        if self._epoch is None or self._epoch[0] != epoch:
            order = self._order(epoch)
            check()
            self._epoch = epoch, order, self._cuts(order, check)
        if self._packed_step is None or self._packed_step[0] != step:
            order, (start, end) = self._epoch[1], self._bounds(step)
            self._packed_step = (
                step,
                StepBatches(
                    self._pack(order[start:end], check), (self._visits[epoch] + end) / len(self._training_rows)
                ),
            )

    def step(self, step: int) -> StepBatches:
        """The micro-batches of optimizer step `step` (from 0)."""
        assert 0 <= step < self.total_steps, f"expected a step below {self.total_steps}, got {step}"
        self.prepare(step)
        assert self._packed_step is not None, "the step was just packed"
        return self._packed_step[1]

    def validation(self) -> tuple[tuple[int, ...], ...]:
        """The validation rows by micro-batch; empty if none are held back."""
        return self._validation

    def _steps_of_epochs(self, epochs: float, check: Callable[[], None]) -> int:
        if epochs * len(self.lengths) > MAX_ROW_VISITS:
            raise InvalidRequest(f"expected at most {MAX_ROW_VISITS} rows over all epochs", field="training.epochs")
        whole = math.ceil(epochs)
        self._extend(whole, check)
        last = self._epoch_starts[whole] - self._epoch_starts[whole - 1]
        return self._epoch_starts[whole - 1] + max(1, round(last * (epochs - (whole - 1))))

    def _bounds(self, step: int) -> tuple[int, int]:
        """Return start and end of the step in the cached order of its epoch."""
        assert self._epoch is not None, "the epoch was just ordered"
        epoch, _, cuts = self._epoch
        index = step - self._epoch_starts[epoch]
        return int(cuts[index]), int(cuts[index + 1])

    def _pack(self, rows: Ints, check: Callable[[], None]) -> tuple[tuple[int, ...], ...]:
        indices: list[int] = rows.tolist()
        sizes: list[int] = self.lengths[rows].tolist()
        packed: list[tuple[int, ...]] = []
        for micro_batch in pack(sizes, self._limit, check, rows=self._rows):
            check()
            packed.append(tuple([indices[i] for i in micro_batch]))
        return tuple(packed)

    def _extend(self, epochs: int, check: Callable[[], None]) -> None:
        """Compute the first step of each of the first `epochs` epochs, and of the epoch after them."""
        for epoch in range(len(self._epoch_starts) - 1, epochs):
            check()
            start, cuts = self._epoch_starts[-1], self._cuts(self._order(epoch), check)
            steps = len(cuts) - 1
            if start < self._first_steps:
                steps = min(steps, self._first_steps - start)
            self._epoch_starts.append(start + steps)
            self._visits.append(self._visits[-1] + int(cuts[steps]))

    def _order(self, epoch: int) -> Ints:
        """Return the rows of an epoch, whose first step is known, in the order in which they are read."""
        rows = self._training_rows
        if self._first_steps:
            rows = self._first_rows if self._epoch_starts[epoch] < self._first_steps else self._rest
        return rows[_generator(self._training.seed, epoch + 1).permutation(len(rows))]

    def _cuts(self, order: Ints, check: Callable[[], None]) -> Ints:
        """Return the start of each step in `order`, then the end of the last one."""
        ends = self._ends(order, check)
        steps = -(-int(ends[-1]) // self._training.batch_tokens)
        if steps >= len(order):
            return np.arange(len(order) + 1)
        shares = ends[-1] * np.arange(1, steps) / steps
        inner = np.unique(np.searchsorted(ends, shares, side="left") + 1)
        return np.concatenate(([0], inner[inner < len(order)], [len(order)]))

    def _ends(self, order: Ints, check: Callable[[], None]) -> Ints:
        """Return the cumulative token counts of the rows in `order`. Summed in blocks, because `cumsum` holds the
        GIL."""
        ends = np.empty(len(order), np.int64)
        total = 0
        for start in range(0, len(order), SUM_ROWS):
            check()
            here = slice(start, start + SUM_ROWS)
            ends[here] = total + np.cumsum(self.lengths[order[here]])
            total = int(ends[min(here.stop, len(order)) - 1])
        return ends


def _split(rows: int, training: TrainingSettings) -> tuple[Ints, Ints]:
    """Split row indices into training and validation rows, both ascending."""
    if not training.held_back:
        return np.arange(rows, dtype=np.int32), np.arange(0)
    if (held := training.validation_rows) >= rows:
        raise InvalidRequest(f"expected less than all {rows} rows, got {held}", field="training.validation_rows")
    if held:
        every = np.arange(rows, dtype=np.int32)
        return every[:-held], every[-held:]
    held = min(max(1, round(rows * training.validation_split)), rows - 1)
    if held < 1:
        raise InvalidRequest(
            f"expected at least 2 rows to hold some back, got {rows}", field="training.validation_split"
        )
    order = _generator(training.seed, 0).permutation(rows).astype(np.int32)
    return np.sort(order[held:]), np.sort(order[:held])


def _generator(seed: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([seed, stream], np.uint64)))


CHECK_INTERVAL = 64
"""Rows between two calls of `check`."""


def pack(
    sizes: Sequence[int], limit: int, check: Callable[[], None] = unchecked, *, rows: int | None = None
) -> list[list[int]]:
    """Pack the indices of `sizes` into bins of at most `limit` tokens and `rows` rows (None: any number). Each goes, in
    order, to the first bin with space for it.

    A size above `limit` gets its own bin. First-fit (Johnson, "Near-optimal bin packing algorithms", 1973) in O(n log
    n). `check` is called every `CHECK_INTERVAL` rows and may raise.
    """
    bins: list[list[int]] = []
    free = _FreeTokens()
    for index, size in enumerate(sizes):
        if index % CHECK_INTERVAL == 0:
            check()
        found = free.first_fit(size)
        if found is None:
            found = len(bins)
            bins.append([])
            free.append(limit)
        bins[found].append(index)
        free.subtract(found, limit if len(bins[found]) == rows else size)  # a bin with all its rows has no space left
    return bins


class _FreeTokens:
    """Free tokens of each bin, in a max segment tree: node i is the maximum of nodes 2i and 2i + 1. The leaves are the
    bins in order; a leaf without a bin is -1."""

    def __init__(self) -> None:
        self._count, self._leaves = 0, 1
        self._most = [-1, -1]

    def first_fit(self, size: int) -> int | None:
        """Return the first bin with at least `size` free tokens."""
        most, node = self._most, 1
        if most[1] < size:
            return None
        while node < self._leaves:
            node *= 2
            if most[node] < size:
                node += 1
        return node - self._leaves

    def append(self, free: int) -> None:
        if self._count == self._leaves:
            self._double()
        self._set(self._leaves + self._count, free)
        self._count += 1

    def subtract(self, index: int, size: int) -> None:
        node = self._leaves + index
        self._set(node, self._most[node] - size)

    def _set(self, node: int, free: int) -> None:
        most = self._most
        most[node] = free
        while node > 1:
            node //= 2
            free = max(most[2 * node], most[2 * node + 1])
            if most[node] == free:
                return
            most[node] = free

    def _double(self) -> None:
        level = self._most[self._leaves :] + [-1] * self._leaves
        levels = [level]
        while len(level) > 1:
            level = [max(pair) for pair in zip(level[::2], level[1::2], strict=True)]
            levels.append(level)
        self._leaves *= 2
        self._most = [-1, *(free for one in reversed(levels) for free in one)]
