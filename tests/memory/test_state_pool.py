"""Slots of recurrent states: none is shared, none is lost; their sizes."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from coserve.core.gpu_memory import EXTRA_SLOTS
from coserve.kernels.recurrent.interface import StateShape
from coserve.memory.state_pool import StatePool, StateSlots, state_bytes
from tests.support.examples import examples


class SlotsMachine(RuleBasedStateMachine):
    held = Bundle("held")

    @initialize(slots=st.integers(1, 6))
    def start(self, slots: int) -> None:
        self.slots, self.out = StateSlots(slots), set[int]()

    @rule(target=held)
    def take(self) -> int | None:
        slot = self.slots.allocate()
        assert (slot is None) == (len(self.out) == self.slots.total)
        if slot is not None:
            assert slot not in self.out
            assert 0 <= slot < self.slots.total
            self.out.add(slot)
        return slot

    @rule(slot=consumes(held))
    def give(self, slot: int | None) -> None:
        if slot is not None:
            self.slots.free(slot)
            self.out.remove(slot)

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "slots"):
            assert self.slots.used == len(self.out)
            self.slots.check_integrity()


SlotsMachine.TestCase.settings = settings(max_examples=examples(50), stateful_step_count=30)
TestSlots = SlotsMachine.TestCase


def test_a_pool_takes_the_bytes_that_are_planned_for_it() -> None:
    shapes = {0: StateShape(56, 4, 4, 8, 6), 3: StateShape(32, 3)}
    pool = StatePool(shapes, slots=5, dtype=torch.bfloat16, device=torch.device("cpu"))
    taken = sum(own.conv.nbytes + own.recurrent.nbytes for own in pool.layers.values())
    assert taken == (5 + EXTRA_SLOTS) * state_bytes(shapes, torch.bfloat16)
