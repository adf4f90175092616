"""Device slots, one per sequence, in which sampled tokens wait for the next step."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

TOKEN_SLOTS = 4096
"""Most sequences with a slot: those that have sampled a token and not ended. Slot 0 is for padding."""


class TokenSlots:
    """The newest token of each sequence, on the device."""

    def __init__(self, device: torch.device, slots: int = TOKEN_SLOTS) -> None:
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        """int64 (slots). Its address is fixed: graphs read and write it."""
        self._slots: dict[Hashable, int] = {}
        self._free = list(range(slots - 1, 0, -1))

    def slot(self, sequence: Hashable) -> int:
        """The sequence's slot, allocated at its first use."""
        slot = self._slots.get(sequence)
        if slot is None:
            slot = self._slots[sequence] = self._free.pop()
        return slot

    def free(self, sequence: Hashable) -> None:
        """Free the slot of a sequence that has ended, if it has one."""
        slot = self._slots.pop(sequence, None)
        if slot is not None:
            self._free.append(slot)

    def fill(self, given_T: Tensor, slots_T: Tensor) -> Tensor:
        """Return a step's token ids: `given_T`, or the slot's token where it is negative."""
        return torch.where(given_T < 0, self.tokens.index_select(0, slots_T), given_T)

    def store(self, slots_B: Tensor, sampled_B: Tensor) -> None:
        """Store sampled tokens for the next step; a negative one (no token) becomes 0."""
        self.tokens.index_copy_(0, slots_B, sampled_B.clamp_min(0))
