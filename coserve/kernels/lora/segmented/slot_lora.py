"""Terms of a serving step, by tables at addresses that a captured graph may keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from coserve.kernels.lora.interface import PreparedLora
from coserve.kernels.lora.segmented import terms
from coserve.kernels.lora.segmented.adapter_table import SiteTable
from coserve.kernels.lora.segmented.launch_scale import scale_rows
from coserve.kernels.lora.segmented.plan import TilePlan
from coserve.kernels.lora.types import SiteGroup

Biases = Mapping[SiteGroup, Sequence[Tensor | None]]
"""The bias of each site of a group, this GPU's shard."""


class SlotLora(PreparedLora):
    """The terms of a step whose segments name slots of a table (`adapter_table.Slots`). Inference only.

    The host only looks up a table and launches, so it can be captured: the contents of `plan` and `tables` may change
    between replays.
    """

    def __init__(
        self,
        tables: Mapping[SiteGroup, SiteTable],
        plan: TilePlan,
        groups: frozenset[int],
        biases: Biases | None = None,
    ) -> None:
        """`groups`: indices, the same in every layer, of the groups of sites that the step's adapters change. `biases`:
        if some adapters are DoRA."""
        self._tables, self.plan, self._groups, self._biases = tables, plan, groups, biases

    def changes(self, group: SiteGroup) -> bool:
        return group.index in self._groups

    def add(self, group: SiteGroup, ys: Sequence[Tensor], x_TD: Tensor) -> list[Tensor]:
        self.add_(group, ys, x_TD)
        return list(ys)

    def add_(self, group: SiteGroup, ys: Sequence[Tensor], x_TD: Tensor, *, overlapped: bool = False) -> None:
        terms.add_(ys, x_TD, self.plan, self._tables[group], overlapped=overlapped)
        if self._biases is not None:
            scale_rows(ys, self.plan.tiles, self._tables[group], self._biases[group])
