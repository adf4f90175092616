"""What every LoRA kernel is told about a packed batch. Built once a step, shared by all layers and sites."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

Plan = TypeVar("Plan")
VECTOR = 8
"""Elements of a row of b_OR that are read together."""
ALIGNMENT = 16
"""Bytes; weights start at a multiple of it, so that they are read 16 bytes at a time."""


@dataclass(frozen=True)
class MainGrads:
    """Sums of a pair's gradients over micro-batches: fp32, contiguous, shaped as the pair's matrices."""

    a_RD: Tensor  # noqa: N815
    b_OR: Tensor  # noqa: N815


class Entry(NamedTuple):
    """What a table tells the kernels of a pair: the addresses of its matrices and of their `MainGrads` (0: none), its rank
    and its scaling."""

    a: int
    b: int
    sum_a: int
    sum_b: int
    rank: int
    scaling: float


@dataclass(frozen=True)
class LoraPair:
    """One adapter at one site, in the compute dtype: `x_TD -> scaling * (x_TD a_RDᵀ) b_ORᵀ`, any rank R >= 1.

    The contents of its tensors may change, not where they lie.
    """

    a_RD: Tensor  # noqa: N815
    b_OR: Tensor  # noqa: N815
    scaling: float
    main_grads: MainGrads | None = None
    """Where `segmented` adds the pair's gradients itself, if it is given; autograd gets none then. Other ways don't look."""

    @property
    def rank(self) -> int:
        return self.a_RD.shape[0]

    @cached_property
    def entry(self) -> Entry | None:
        """None where the kernels cannot read the pair as it lies: contiguous, aligned, b_OR's rows whole vectors."""
        if self.b_OR.shape[1] % VECTOR or not (lies_well(self.a_RD) and lies_well(self.b_OR)):
            return None
        sums = (0, 0)
        if self.main_grads is not None:
            both = self.main_grads.a_RD, self.main_grads.b_OR
            assert all(own.dtype == torch.float32 and own.is_contiguous() for own in both), (
                "expected contiguous fp32 sums"
            )
            assert all(own.data_ptr() % ALIGNMENT == 0 for own in both), "expected sums at whole vectors"
            sums = both[0].data_ptr(), both[1].data_ptr()
        return Entry(self.a_RD.data_ptr(), self.b_OR.data_ptr(), *sums, self.rank, self.scaling)


def lies_well(weight: Tensor) -> bool:
    """Contiguous and aligned."""
    return weight.is_contiguous() and weight.data_ptr() % ALIGNMENT == 0


@dataclass(frozen=True)
class Stacked:
    """The frozen weights of up to three sites that read one input."""

    weight: Tensor
    """(ΣO, D)."""
    bias: Tensor | None
    sizes: tuple[int, ...]
    """Each site's O."""


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
