"""The experts' (A, B) pairs that a LoRA server holds, and the LoRA terms that it computes with them.

T tokens, K experts of each, D hidden features, I inner ones, O outputs of gate and up; S = T K choices.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from coserve.core.errors import AdapterNotFound
from coserve.core.types import SiteSpec
from coserve.kernels.lora.experts.interface import ExpertLora
from coserve.kernels.lora.experts.rows import ExpertRows, summed
from coserve.kernels.lora.experts.slot_terms import ExpertSlots, SlotExpertLora
from coserve.kernels.lora.experts.terms import GroupedExpertLora
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair


class HeldPairs:
    """A server's part of adapters' pairs, by slot. A slot is filled by one load at a time, layer after layer.

    `add` and `end` may be called on any thread, all else on that of the engine's steps. This one alone changes a GPU's
    tables, on its own stream, so that a change comes before the steps that need it, and nobody waits for the device.
    """

    def __init__(self, sites: Mapping[str, SiteSpec], slots: int, device: torch.device) -> None:
        self.sites, self._device = sites, device
        self._changed = threading.Condition()
        self._slots: dict[int, _Slot] = {}
        self.version = 0
        """Changes of the table so far."""
        self._table = ExpertSlots([*sites], slots, device) if device.type == "cuda" else None

    def reserve(self, slot: int, load: int) -> None:
        """Empty a slot, which this load alone may fill from now on."""
        with self._changed:
            self._clear(slot)
            self._slots[slot] = _Slot(load)

    def clear(self, slot: int) -> None:
        """Empty a slot; a load into it that has not ended is void."""
        with self._changed:
            self._clear(slot)

    def close(self) -> None:
        """Empty all slots; all loads are void."""
        with self._changed:
            for slot in [*self._slots]:
                self._clear(slot)

    def add(self, slot: int, load: int, pairs: Mapping[str, LoraPair], rank: int) -> int:
        """Add the next layers' pairs, which are complete on the device; return the table's version when the slot had
        its first ones. `rank`: at least that of any pair of the adapter. Raises `AdapterNotFound` if the load is
        void."""
        with self._changed:
            own = self._slots.get(slot)
            if own is None or own.load != load:
                raise AdapterNotFound("the adapter was dropped")
            if not own.since:
                self.version += 1
                own.since, own.rank = self.version, rank
            own.pairs |= pairs
            own.through = max((self.sites[name].layer for name in pairs), default=own.through)
            self._changed.notify_all()
            return own.since

    def end(self, slot: int, load: int, error: Exception | None = None, *, kept: object = None) -> None:
        """Note that a load has ended, and with what error; nothing if it is void. `kept`: see `PairsRuns`."""
        with self._changed:
            own = self._slots.get(slot)
            if own is not None and own.load == load:
                own.through, own.error, own.kept = math.inf, error, kept
                self._changed.notify_all()

    def step(self, bounds: tuple[int, ...], slots: tuple[int, ...], version: int) -> StepTerms:
        """Return the terms of a step (`BeginStep`). Raises `LookupError` if the slots have changed since `version`."""
        with self._changed:
            found = {slot: self._slots.get(slot) for slot in slots if slot >= 0}
            own = {slot: held for slot, held in found.items() if held is not None and 0 < held.since <= version}
            if len(own) < len(found) or version > self.version:
                wrong = sorted(found.keys() - own.keys())
                raise LookupError(f"slots {wrong} do not hold what version {version} knows; here it is {self.version}")
            segments, wait = Segments(bounds, slots), partial(self._wait, own)
        if self._table is None:
            place = {slot: i for i, slot in enumerate(own)}
            places = Segments(bounds, tuple(place.get(slot, -1) for slot in slots))
            pairs = [held.pairs for held in own.values()]
            return StepTerms(GroupedExpertLora(places, pairs, self._device), self.sites, wait)
        lengths = torch.tensor([end - start for start, end in pairwise(bounds)])
        slots_T = torch.repeat_interleave(torch.tensor(segments.adapters, dtype=torch.int32), lengths)
        most = max([1, *(held.rank for held in own.values())])
        return StepTerms(SlotExpertLora(self._table.tables, slots_T.to(self._device), most), self.sites, wait)

    def _wait(self, own: Mapping[int, _Slot], layer: int) -> None:
        """Wait until the pairs of these slots are loaded up to a layer, and in the tables. Raises `LookupError` if one
        cannot be read."""
        with self._changed:
            self._changed.wait_for(lambda: all(held.through >= layer for held in own.values()))
            for slot, held in own.items():
                if self._table is not None and held.in_table < len(held.pairs):
                    self._table.put(slot, held.pairs)
                    held.in_table = len(held.pairs)
        for held in own.values():
            if held.error is not None:
                raise LookupError(f"an adapter of the step could not be read: {held.error}") from held.error

    def _clear(self, slot: int) -> None:
        own = self._slots.pop(slot, None)
        if own is not None and own.since:
            self.version += 1
            if self._table is not None:
                self._table.clear(slot)


@dataclass(eq=False)
class _Slot:
    """How far the adapter of a slot is loaded."""

    load: int
    """Number of the load that fills it."""
    pairs: dict[str, LoraPair] = field(default_factory=dict)
    in_table: int = 0
    """Number of pairs that the GPU's tables have."""
    rank: int = 0
    since: int = 0
    """Version of the table from which on the slot has its first pairs; 0: none is loaded."""
    through: float = -1
    """Layer up to which all its pairs are loaded; infinite: the load has ended."""
    error: Exception | None = None
    kept: object = None


class StepTerms:
    """The terms of one step's tokens, layer by layer."""

    def __init__(self, lora: ExpertLora, sites: Mapping[str, SiteSpec], wait: Callable[[int], None]) -> None:
        """`wait`: waits until the adapters' pairs of a layer are loaded."""
        self._lora, self._sites, self._wait = lora, sites, wait
        self._rows: ExpertRows | None = None
        """Rows of the layer whose terms of gate and up were computed last; those of other servers' experts come
        last."""

    def gate_up(self, site: str, x_TD: Tensor, chosen_TK: Tensor) -> Tensor:
        """Return the terms (S, O) of gate and up, or of up alone, zeros for other servers' experts. `chosen_TK`:
        numbers among this server's, or one past the last."""
        spec = self._sites[site]
        self._wait(spec.layer)
        # A step that goes on although its engine is gone reads anything: no number may point beyond a table.
        rows = self._rows = self._lora.sorted_rows(chosen_TK.clamp(0, spec.experts), spec.experts)
        zeros_SO = x_TD.new_zeros(len(rows.place_S), spec.out_features)
        return self._lora.add(site, zeros_SO, x_TD[rows.token_S], rows)[rows.place_S]

    def down(self, site: str, h_SI: Tensor, weights_TK: Tensor) -> Tensor:
        """Return the terms (T, D) of down, summed over each token's experts here by the router's weights. The layer is
        that of the last `gate_up`."""
        rows = self._rows
        assert rows is not None, "expected the inputs of gate and up first"
        sorted_SI = torch.empty_like(h_SI)
        sorted_SI[rows.place_S] = h_SI
        zeros_SD = h_SI.new_zeros(len(h_SI), self._sites[site].out_features)
        return summed(self._lora.add(site, zeros_SD, sorted_SI, rows), rows.place_S, weights_TK).to(h_SI.dtype)
