"""Limits of micro-batches: a job's become smaller when memory is short or runs out, and those of several jobs share one
forward as far as they fit. No tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coserve.admission.recompute_plan import RecomputePlan
from coserve.data.corpus.batch_plan import Ints, pack


@dataclass(frozen=True)
class Size:
    """Size of a micro-batch."""

    tokens: int
    rows: int


@dataclass(frozen=True)
class BatchLimits:
    """Most tokens and rows of one training forward. `rows`: None: unlimited."""

    tokens: int
    rows: int | None = None


def companions(first: Size, others: Iterable[tuple[str, Size]], limits: BatchLimits) -> list[str]:
    """Return the jobs whose micro-batches join `first` in one forward: in their scheduling order, each that still fits.

    A micro-batch is never cut, so a job's batches and dropout do not depend on which jobs share the forward.
    """
    tokens, rows, found = first.tokens, first.rows, list[str]()
    for job, size in others:
        if tokens + size.tokens <= limits.tokens and (limits.rows is None or rows + size.rows <= limits.rows):
            tokens, rows = tokens + size.tokens, rows + size.rows
            found.append(job)
    return found


@dataclass(frozen=True)
class StepRecompute:
    """Recompute plan of one optimizer step, fixed when the step begins."""

    recomputed: int = 0
    """Number of lowest layers that keep only their input: `RecomputePlan.recomputed`."""
    partly: int = 0
    """Number of layers above those that recompute all but attention: `RecomputePlan.partly`."""
    compiled: bool = False
    """Whether memory was planned for compiled layers."""

    @property
    def recomputes(self) -> bool:
        """Whether any layer is recomputed, even in part."""
        return self.recomputed + self.partly > 0


AS_CONFIGURED = StepRecompute()
"""No layer is recomputed unless the runner always does so."""
MicroBatches = Sequence[tuple[int, ...]]
"""Row indices of each micro-batch."""


class MemoryLimits:
    """Cuts a job's micro-batches to fit the memory. The rows of an optimizer step never change. Nor does its result,
    except for rounding, and for dropout and NEFTune, which draw for each micro-batch."""

    def __init__(self, lengths: Ints, layers: int, extra: int = 0) -> None:
        """`lengths`: tokens of each row of the corpus, or of a client's batch; `layers`: number of layers of the
        base; `extra`: tokens of an encoder, which every micro-batch has besides its rows."""
        self.lengths, self._layers, self._extra = lengths, layers, extra
        self.tokens: int | None = None
        """Most tokens of a micro-batch with several rows; None: no limit from an out-of-memory."""
        self.recompute = False
        """Whether all layers keep only their input, whatever the engine's setting."""
        self.planned: RecomputePlan | None = None

    def plan(self, recompute_plan: RecomputePlan | None) -> None:
        """Set the plan of optimizer steps that begin from now on; None: the engine's settings. Limits that `lower` has
        found still apply. The step in progress keeps its plan: its micro-batches might not fit with fewer layers
        recomputed."""
        self.planned = recompute_plan

    @property
    def recompute_plan(self) -> StepRecompute:
        """Recompute plan of a step that begins now; read it together with `cut`."""
        planned = RecomputePlan(0) if self.planned is None else self.planned
        if self.recompute:
            return StepRecompute(self._layers, 0, planned.compiled)
        return StepRecompute(planned.recomputed, planned.partly, planned.compiled)

    def cut(self, micro_batches: MicroBatches) -> MicroBatches:
        """Split the micro-batches to stay within the limits; the rows stay the same."""
        planned = None if self.planned is None else self.planned.tokens
        limits = [limit for limit in (self.tokens, planned) if limit is not None]
        if not limits:
            return micro_batches
        found: list[tuple[int, ...]] = []
        for rows in micro_batches:
            parts = pack(self.lengths[list(rows)].tolist(), max(1, min(limits) - self._extra))
            found += [tuple(rows[i] for i in part) for part in parts]
        return found

    def lower(self, rows: Sequence[int], recomputed: int) -> str | None:
        """Lower the limits after an out-of-memory in a micro-batch of these rows that recomputed `recomputed` layers.
        Its step begins again. Returns what changes, for the user; None if nothing is left to lower."""
        tokens = self.size(rows)
        if len(rows) > 1:
            self.tokens = tokens // 2
            return f"not enough memory for {tokens} tokens at once: it trains on at most {self.tokens}"
        if not self.recompute and recomputed < self._layers:  # if the engine recomputes anyway, this is just a retry
            self.recompute = True
            return f"not enough memory for {tokens} tokens at once: each layer is computed again in the backward"
        return None

    def size(self, rows: Sequence[int]) -> int:
        """Tokens of a micro-batch of these rows."""
        return int(self.lengths[list(rows)].sum()) + self._extra
