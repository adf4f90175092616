"""Slots for the recurrent states of running sequences: their bookkeeping, their memory, which is not in pages, and
copies of it in pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from coserve.kernels.attention.interface import TokenRun
from coserve.kernels.recurrent.interface import Recurrence, StateShape, StaticRecurrence
from coserve.kernels.recurrent.slots import GatheredRecurrence, LayerStates, SlotRecurrence
from coserve.memory.buffer import PageBuffer, aligned


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
    """The memory of a base's recurrent states, for all slots. A slot need not be cleared: a sequence's first tokens
    read zeros instead."""

    def __init__(
        self, shapes: Mapping[int, StateShape], *, slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.slots, self._device = StateSlots(slots), device
        rows, layers = slots + 2, dict[int, LayerStates]()  # two more: see `LayerStates`
        self._parts = list[torch.Tensor]()
        """Layers of one shape have one tensor (L, S + 2, ...) for their convolutions, and one for their recurrences, so
        that few operations copy a slot."""
        for one in dict.fromkeys(shapes.values()):
            same = [layer for layer in shapes if shapes[layer] == one]
            conv = torch.zeros(len(same), rows, max(0, one.taps - 1), one.channels, dtype=dtype, device=device)
            recurrent = torch.zeros(
                len(same), rows, one.heads, one.keys, one.values, dtype=torch.float32, device=device
            )
            self._parts += [part for part in (conv, recurrent) if part.numel()]
            layers |= {layer: LayerStates(conv[i], recurrent[i]) for i, layer in enumerate(same)}
        self.layers = {layer: layers[layer] for layer in shapes}

    def of(self, slot: int) -> list[torch.Tensor]:
        """The slot's memory: views (L, ...) over the layers of one shape."""
        return [part[:, slot] for part in self._parts]

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


class StateSnapshots:
    """Copies recurrent states between slots and pages, in stream order.

    A state is put together in one buffer first: the host then launches a few operations, however many layers and pages
    there are.
    """

    def __init__(self, states: StatePool, buffer: PageBuffer) -> None:
        self._states, self._page_buffer = states, buffer
        parts = states.of(0)
        ends = [*accumulate(aligned(part.nbytes) for part in parts)]
        self.pages = buffer.pages_for(ends[-1])
        """Pages of one snapshot."""
        self._whole = torch.zeros(self.pages, buffer.page_bytes, dtype=torch.uint8, device=buffer.device)
        flat = self._whole.view(-1)
        self._parts = [
            flat[start : start + part.nbytes].view(part.dtype).view(part.shape)
            for start, part in zip([0, *ends], parts, strict=False)
        ]

    def save(self, slot: int, pages: Sequence[int]) -> None:
        """Copy the state in a slot into pages."""
        for part, own in zip(self._parts, self._states.of(slot), strict=True):
            part.copy_(own)
        self._page_buffer.write(pages, self._whole)
        self._page_buffer.step_copies()

    def restore(self, slot: int, pages: Sequence[int]) -> None:
        """Copy a state from pages into a slot."""
        self._page_buffer.read(pages, self._whole)
        for part, own in zip(self._parts, self._states.of(slot), strict=True):
            own.copy_(part)
        self._page_buffer.step_copies()
