"""A packed batch cut by adapter, the input of every LoRA backend. Built once a step, shared by all layers and sites."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Segments:
    """A packed batch of T tokens cut into S runs, each of one adapter.

    `bounds` (S+1) ascends from 0 to T; `adapters` (S) indexes the step's adapters, -1 for none. Empty segments and
    neighbouring segments of one adapter are allowed, and an adapter may come back later in the batch.
    """

    bounds: tuple[int, ...]
    adapters: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.bounds) == len(self.adapters) + 1, "expected one bound more than segments"
        assert self.bounds[0] == 0, "expected bounds to start at 0"
        assert all(a <= b for a, b in zip(self.bounds, self.bounds[1:], strict=False)), "expected ascending bounds"

    @property
    def tokens(self) -> int:
        return self.bounds[-1]

    @cached_property
    def runs(self) -> dict[int, list[tuple[int, int]]]:
        """For each adapter, the `[start, end)` rows of its runs in order, without empty ones and with neighbours
        merged.

        There is no entry for -1.
        """
        runs: dict[int, list[tuple[int, int]]] = {}
        for adapter, start, end in zip(self.adapters, self.bounds, self.bounds[1:], strict=False):
            if adapter < 0 or start == end:
                continue
            own = runs.setdefault(adapter, [])
            if own and own[-1][1] == start:
                own[-1] = (own[-1][0], end)
            else:
                own.append((start, end))
        return runs
