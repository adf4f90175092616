"""Terms of a serving step, by tables at addresses that a captured graph may keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from coserve.kernels.lora.interface import PreparedLora
from coserve.kernels.lora.segmented import terms
from coserve.kernels.lora.segmented.adapter_table import SiteTable
from coserve.kernels.lora.segmented.plan import TilePlan
from coserve.kernels.lora.types import SiteGroup


class SlotLora(PreparedLora):
    """The terms of a step whose segments name slots of a table (`adapter_table.Slots`). Inference only.

    The host only looks up a table and launches, so it can be captured: the contents of `plan` and `tables` may change
    between replays.
    """

    def __init__(self, tables: Mapping[SiteGroup, SiteTable], plan: TilePlan, groups: frozenset[int]) -> None:
        """`groups`: indices, the same in every layer, of the groups of sites that the step's adapters change."""
        self._tables, self.plan, self._groups = tables, plan, groups

    def changes(self, group: SiteGroup) -> bool:
        return group.index in self._groups

    def add(self, group: SiteGroup, ys: Sequence[Tensor], x_TD: Tensor) -> list[Tensor]:
        self.add_(group, ys, x_TD)
        return list(ys)

    def add_(self, group: SiteGroup, ys: Sequence[Tensor], x_TD: Tensor, *, overlapped: bool = False) -> None:
        terms.add_(ys, x_TD, self.plan, self._tables[group], overlapped=overlapped)
