"""Cuts a job's micro-batches smaller where memory is short, and each time that it runs out. No tensors."""

from __future__ import annotations

from collections.abc import Sequence

from coserve.corpus.batch_plan import Ints
from coserve.corpus.packing import pack

MicroBatches = Sequence[tuple[int, ...]]
"""Row indices of each micro-batch."""


class MemoryLimits:
    """At first the micro-batches are as planned. The rows of an optimizer step, and so its result, never change."""

    def __init__(self, lengths: Ints) -> None:
        """`lengths`: tokens of each row of the corpus."""
        self._lengths = lengths
        self.tokens: int | None = None
        """Most tokens of a micro-batch of several rows; None: as planned."""
        self.recompute = False
        """Keep only each layer's input, whatever the engine's setting."""
        self._planned: tuple[int | None, bool] = None, False

    def plan(self, tokens: int | None, *, recompute: bool) -> None:
        """Most tokens of a micro-batch (None: as planned) and recomputation, until the next call; what `lower` has found holds
        besides."""
        self._planned = tokens, recompute

    @property
    def recomputes(self) -> bool:
        """Only each layer's input is kept."""
        return self.recompute or self._planned[1]

    def cut(self, micro_batches: MicroBatches) -> MicroBatches:
        """The same rows in micro-batches within the limit."""
        limits = [limit for limit in (self.tokens, self._planned[0]) if limit is not None]
        if not limits:
            return micro_batches
        found: list[tuple[int, ...]] = []
        for rows in micro_batches:
            parts = pack(self._lengths[list(rows)].tolist(), min(limits))
            found += [tuple(rows[i] for i in part) for part in parts]
        return found

    def lower(self, rows: Sequence[int]) -> str | None:
        """Memory ran out in a micro-batch of these rows. Returns what changes, for the user; None: nothing is left to lower."""
        tokens = self.size(rows)
        if len(rows) > 1:
            self.tokens = tokens // 2
            return f"not enough memory for {tokens} tokens at once: it trains on at most {self.tokens}"
        if not self.recomputes:  # where the engine recomputes anyway this is one more attempt
            self.recompute = True
            return f"not enough memory for {tokens} tokens at once: each layer is computed again in the backward"
        return None

    def size(self, rows: Sequence[int]) -> int:
        """Tokens of these rows."""
        return int(self._lengths[list(rows)].sum())
