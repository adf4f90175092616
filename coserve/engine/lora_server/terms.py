"""The pairs of experts that a LoRA server holds, and the terms of the rows that come in.

N tokens, K experts of each, D hidden features, I inner ones, O outputs of gate and up; S = N K rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from coserve.core.types import SiteSpec
from coserve.kernels.lora.experts.interface import ExpertLora
from coserve.kernels.lora.experts.rows import ExpertRows, summed
from coserve.kernels.lora.experts.slot_terms import ExpertSlots, SlotExpertLora
from coserve.kernels.lora.experts.terms import GroupedExpertLora
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair


class HeldPairs:
    """Adapters' pairs of some parameters of experts, by slot. Not thread-safe."""

    def __init__(self, sites: Mapping[str, SiteSpec], slots: int, device: torch.device) -> None:
        self.sites, self._device = sites, device
        self._pairs: dict[int, Mapping[str, LoraPair]] = {}
        self._put_at: dict[int, int] = {}
        self.version = 0
        """Changes of the table so far."""
        self._table = ExpertSlots([*sites], slots, device) if device.type == "cuda" else None

    def put(self, slot: int, pairs: Mapping[str, LoraPair]) -> None:
        """Hold an adapter's pairs, which are on the device, in an empty slot."""
        if self._table is not None and pairs:
            self._table.put(slot, pairs)
        self.version += 1
        self._pairs[slot], self._put_at[slot] = pairs, self.version

    def clear(self, slot: int) -> None:
        """Empty a slot, if it is not empty."""
        if self._pairs.pop(slot, None) is not None:
            self.version += 1
            del self._put_at[slot]
            if self._table is not None:
                self._table.clear(slot)

    def step(self, bounds: tuple[int, ...], slots: tuple[int, ...], version: int) -> StepTerms:
        """Return the terms of a step (`BeginStep`). Raises `LookupError` if the slots have changed since `version`."""
        wrong = [slot for slot in slots if self._put_at.get(slot, version + 1) > version]
        if wrong or version > self.version:
            raise LookupError(f"slots {wrong} do not hold what version {version} knows; here it is {self.version}")
        segments = Segments(bounds, slots)
        if self._table is None:
            place = {slot: i for i, slot in enumerate(dict.fromkeys(slots))}
            own = Segments(bounds, tuple(place[slot] for slot in slots))
            return StepTerms(GroupedExpertLora(own, [self._pairs[slot] for slot in place], self._device), self.sites)
        lengths = torch.tensor([end - start for start, end in pairwise(bounds)])
        slots_N = torch.repeat_interleave(torch.tensor(segments.adapters, dtype=torch.int32), lengths)
        most = max(1, *(self._table.ranks[slot] for slot in slots))
        return StepTerms(SlotExpertLora(self._table.tables, slots_N.to(self._device), most), self.sites)


class StepTerms:
    """The terms of one step's tokens, layer by layer."""

    def __init__(self, lora: ExpertLora, sites: Mapping[str, SiteSpec]) -> None:
        self._lora, self._sites = lora, sites
        self._rows: ExpertRows | None = None
        """The rows of the layer whose terms of gate and up were computed last."""

    def gate_up(self, site: str, x_ND: Tensor, chosen_NK: Tensor) -> Tensor:
        """Return the terms (N, K, O) of gate and up, or of up alone."""
        spec = self._sites[site]
        rows = self._rows = self._lora.sorted_rows(chosen_NK, spec.experts)
        zeros_SO = x_ND.new_zeros(chosen_NK.numel(), spec.out_features)
        y_SO = self._lora.add(site, zeros_SO, x_ND[rows.token_S], rows)
        return y_SO[rows.place_S].view(*chosen_NK.shape, -1)

    def down(self, site: str, h_NKI: Tensor, weights_NK: Tensor) -> Tensor:
        """Return the terms (N, D) of down, summed over each token's experts by the router's weights. The layer is that
        of the last `gate_up`."""
        rows = self._rows
        assert rows is not None, "expected the inputs of gate and up first"
        h_SI = h_NKI.new_empty(rows.place_S.shape[0], h_NKI.shape[2])
        h_SI[rows.place_S] = h_NKI.flatten(0, 1)
        y_SD = self._lora.add(site, h_SI.new_zeros(len(h_SI), self._sites[site].out_features), h_SI, rows)
        return summed(y_SD, rows.place_S, weights_NK).to(h_NKI.dtype)
