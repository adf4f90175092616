"""What every LoRA kernel is told about a packed batch. Built once a step, shared by all layers and sites."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
from torch import Tensor

Plan = TypeVar("Plan")


@dataclass(frozen=True)
class Segments:
    """A packed batch of T tokens cut into S runs, each of one adapter.

    `bounds` (S+1) ascends from 0 to T; `adapters` (S) indexes the step's adapters, -1 for none. Empty segments and
    neighbouring segments of one adapter are allowed, and an adapter may come back later in the batch.
    """

    bounds: tuple[int, ...]
    adapters: tuple[int, ...]
    plans: dict[Hashable, object] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What a way of computing derived from this batch; lives and dies with it."""

    def __post_init__(self) -> None:
        assert len(self.bounds) == len(self.adapters) + 1, "expected one bound more than segments"
        assert self.bounds[0] == 0, "expected bounds to start at 0"
        assert all(a <= b for a, b in zip(self.bounds, self.bounds[1:], strict=False)), "expected ascending bounds"

    @property
    def tokens(self) -> int:
        return self.bounds[-1]

    def runs(self) -> dict[int, list[tuple[int, int]]]:
        """Adapter -> its `[start, end)` rows in order, empty segments dropped and neighbours joined; no entry for -1."""
        return self.plan("runs", self._runs)

    def _runs(self) -> dict[int, list[tuple[int, int]]]:
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

    @property
    def anchor(self) -> Tensor:
        """What a backward reaches that adds to `MainGrads` where nothing below it learns; it gets no gradient."""
        return self.plan("anchor", lambda: torch.empty(0, requires_grad=True))

    def plan(self, key: Hashable, build: Callable[[], Plan]) -> Plan:
        """The plan kept under `key`, built on first use: once a step, not once a layer."""
        if key not in self.plans:
            self.plans[key] = build()
        return cast("Plan", self.plans[key])
