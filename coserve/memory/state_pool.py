"""Slots for the recurrent states of running sequences: their bookkeeping, and their memory, which is not in pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from coserve.core.gpu_memory import EXTRA_SLOTS
from coserve.kernels.attention.interface import TokenRun
from coserve.kernels.recurrent.interface import Recurrence, StateShape, StaticRecurrence
from coserve.kernels.recurrent.slots import GatheredRecurrence, LayerStates, SlotRecurrence


class StateSlots:
    """Slots 0 to slots - 1, each free or in use by one sequence. No tensors."""

    def __init__(self, slots: int) -> None:
        assert slots > 0, f"expected at least one slot, got {slots}"
        self.total = slots
        self._free = list(reversed(range(slots)))
        self._used = set[int]()

    @property
    def used(self) -> int:
        """Slots in use."""
        return len(self._used)

    def allocate(self) -> int | None:
        """A free slot, or None. Its content is that of its last sequence."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._used.add(slot)
        return slot

    def free(self, slot: int) -> None:
        assert slot in self._used, f"slot {slot} is freed but not in use"
        self._used.remove(slot)
        self._free.append(slot)

    def check_integrity(self) -> None:
        """Assert that every slot is either free or in use."""
        assert sorted([*self._free, *self._used]) == list(range(self.total)), "a slot is lost, or in two states"


def state_bytes(shapes: Mapping[int, StateShape], dtype: torch.dtype) -> int:
    """Bytes of one slot. `dtype`: of the base, in which the convolutions' inputs are kept."""
    return sum(
        max(0, one.taps - 1) * one.channels * dtype.itemsize + one.heads * one.keys * one.values * 4
        for one in shapes.values()
    )


class StatePool:
    """The memory of a base's recurrent states: for each layer with a state, one tensor over all slots.

    A slot need not be cleared: a sequence's first tokens read zeros instead.
    """

    def __init__(
        self, shapes: Mapping[int, StateShape], *, slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.slots, self._device = StateSlots(slots), device
        rows = slots + EXTRA_SLOTS
        self.layers = {
            layer: LayerStates(
                torch.zeros(rows, max(0, one.taps - 1), one.channels, dtype=dtype, device=device),
                torch.zeros(rows, one.heads, one.keys, one.values, dtype=torch.float32, device=device),
            )
            for layer, one in shapes.items()
        }

    def of(self, slot: int) -> list[torch.Tensor]:
        """The slot's memory: (N) uint8 for each part of a layer's state."""
        parts = [part[slot] for layer in self.layers.values() for part in (layer.conv, layer.recurrent)]
        return [part.view(-1).view(torch.uint8) for part in parts if part.numel()]

    def recurrence(self, runs: Sequence[TokenRun]) -> Recurrence:
        """The recurrence of one packed step. It reads and writes the states of the runs' slots."""
        if self._device.type != "cuda":
            return SlotRecurrence(self.layers, runs, self._device)
        tokens = sum(run.tokens for run in runs)
        fused = self.static_recurrence(tokens=tokens, sequences=len(runs), decodes=tokens == len(runs))
        fused.load(runs)
        return fused

    def static_recurrence(self, *, tokens: int, sequences: int, decodes: bool) -> StaticRecurrence:
        """The recurrence of steps of up to `tokens` tokens of `sequences` sequences, in buffers that a CUDA graph may
        keep. `decodes`: each sequence has one token."""
        if self._device.type != "cuda":
            return GatheredRecurrence(self.layers, self._device)
        from coserve.kernels.recurrent.fused.steps import FusedRecurrence  # needs Triton, which not every CPU has

        return FusedRecurrence(self.layers, tokens=tokens, sequences=sequences, device=self._device, decodes=decodes)
