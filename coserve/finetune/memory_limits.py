"""Cuts a job's micro-batches smaller where memory is short, and each time that it runs out. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coserve.admission.treatment import Treatment
from coserve.data.corpus.batch_plan import Ints
from coserve.data.corpus.packing import pack


@dataclass(frozen=True)
class StepTreatment:
    """How the micro-batches of one optimizer step are computed, whatever is planned meanwhile."""

    recomputed: int
    """Layers that keep their input only: `Treatment.recomputed`."""
    partly: int
    """Layers above those that are computed again but for attention: `Treatment.partly`."""
    compiled: bool
    """Whether memory is planned for compiled layers."""

    @property
    def recomputes(self) -> bool:
        """Whether any layer keeps less than all."""
        return self.recomputed + self.partly > 0


MicroBatches = Sequence[tuple[int, ...]]
"""Row indices of each micro-batch."""


class MemoryLimits:
    """At first the micro-batches are as planned. The rows of an optimizer step never change, nor does its result, but
    for rounding and for dropout and NEFTune, which draw for each micro-batch."""

    def __init__(self, lengths: Ints, layers: int) -> None:
        """`lengths`: tokens of each row of the corpus; `layers`: of the base."""
        self._lengths, self._layers = lengths, layers
        self.tokens: int | None = None
        """Most tokens of a micro-batch of several rows; None: as planned."""
        self.recompute = False
        """Keep only each layer's input, whatever the engine's setting."""
        self.planned: Treatment | None = None

    def plan(self, treatment: Treatment | None) -> None:
        """How the optimizer steps are computed that begin from now on; None: as the engine's settings say. What `lower`
        has found holds besides. The step in progress goes on as it was cut: micro-batches of its size might not fit
        with fewer layers recomputed."""
        self.planned = treatment

    @property
    def treatment(self) -> StepTreatment:
        """Of a step that begins now: take it along with `cut`."""
        planned = Treatment(0) if self.planned is None else self.planned
        if self.recompute:
            return StepTreatment(self._layers, 0, planned.compiled)
        return StepTreatment(planned.recomputed, planned.partly, planned.compiled)

    def cut(self, micro_batches: MicroBatches) -> MicroBatches:
        """The same rows in micro-batches within the limit."""
        planned = None if self.planned is None else self.planned.tokens
        limits = [limit for limit in (self.tokens, planned) if limit is not None]
        if not limits:
            return micro_batches
        found: list[tuple[int, ...]] = []
        for rows in micro_batches:
            parts = pack(self._lengths[list(rows)].tolist(), min(limits))
            found += [tuple(rows[i] for i in part) for part in parts]
        return found

    def lower(self, rows: Sequence[int], recomputed: int) -> str | None:
        """Memory ran out in a micro-batch of these rows, which recomputed so many layers: its step begins again with
        less. Returns what changes, for the user; None: nothing is left to lower."""
        tokens = self.size(rows)
        if len(rows) > 1:
            self.tokens = tokens // 2
            return f"not enough memory for {tokens} tokens at once: it trains on at most {self.tokens}"
        if (
            not self.recompute and recomputed < self._layers
        ):  # where the engine recomputes anyway this is one more attempt
            self.recompute = True
            return f"not enough memory for {tokens} tokens at once: each layer is computed again in the backward"
        return None

    def size(self, rows: Sequence[int]) -> int:
        """Tokens of these rows."""
        return int(self._lengths[list(rows)].sum())
