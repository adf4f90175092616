"""Sizes of the KV cache and of slots of recurrent states: allocated pages are clean, no slot is shared or lost."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from coserve.core.errors import ConfigError
from coserve.core.gpu_memory import EXTRA_SLOTS
from coserve.kernels.attention.interface import AttentionParams, KvShape, TokenRun
from coserve.kernels.recurrent.interface import StateShape
from coserve.memory.kv import KvCache
from coserve.memory.state_pool import StatePool, StateSlots, state_bytes
from tests.support.examples import examples


@dataclass
class Shapes:
    kv_shapes: list[KvShape] = field(default_factory=lambda: [KvShape(2, 8, 8), KvShape(1, 16, 16)])
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    states: dict[int, StateShape] = field(default_factory=dict)


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (16, 1), (17, 2), (160, 10)])
def test_room_for_at_least_the_tokens_asked_for(tokens: int, pages: int) -> None:
    kv = KvCache.for_base(Shapes(), tokens, 16)
    assert kv.pool.total == pages
    assert kv.tokens == 16 * pages


def test_no_room_is_a_typed_error() -> None:
    with pytest.raises(ConfigError, match="at least 1 token"):
        KvCache.for_base(Shapes(), 0, 16)


def test_a_cache_in_fp8_takes_a_byte_of_each_number() -> None:
    kv = KvCache.for_base(Shapes(), 64, 16, kv_cache_dtype="fp8")
    assert 4 * kv.shape.page_bytes == KvCache.for_base(Shapes(), 64, 16).shape.page_bytes
    assert all(view.dtype == torch.float8_e4m3fn for view in (*kv.views.keys, *kv.views.values))


def test_pages_for() -> None:
    kv = KvCache.for_base(Shapes(), 64, 16)
    assert [kv.pages_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_what_an_earlier_holder_left_does_not_reach_the_next() -> None:
    """A NaN in a slot that is not written yet must not pass through attention, which gives the slot weight zero."""
    kv = KvCache([KvShape(1, 4, 4)], pages=1, page_tokens=8, dtype=torch.float32, device=torch.device("cpu"))

    def attend(value: float, tokens: int) -> torch.Tensor:
        pages = kv.allocate(1)
        assert pages is not None
        attention = kv.attention([TokenRun(tokens, 0, tuple(pages))])
        x = torch.full((1, tokens, 4), value)
        out = attention.attend(0, x, x, x, AttentionParams(scaling=1.0))
        kv.free(pages)
        return out

    clean = attend(0.5, 2)
    attend(float("nan"), 8)
    assert torch.equal(attend(0.5, 2), clean)


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


def test_states_take_the_bytes_that_are_planned_for_them() -> None:
    """The buffer of snapshots has whole pages."""
    shapes = {0: StateShape(56, 4, 4, 8, 6), 1: StateShape(56, 4, 4, 8, 6), 3: StateShape(32, 3)}
    kv = KvCache.for_base(Shapes(dtype=torch.bfloat16, states=shapes), 256, 4, sequences=5)
    assert kv.states is not None and [*kv.states.layers] == [*shapes]
    taken = sum(own.conv.nbytes + own.recurrent.nbytes for own in kv.states.layers.values())
    state = state_bytes(shapes, torch.bfloat16)
    assert taken + state == (5 + EXTRA_SLOTS) * state
    assert state <= kv.state_pages * kv.buffer.page_bytes < state + 2 * kv.buffer.page_bytes


def bits(states: StatePool, slot: int) -> torch.Tensor:
    """All layers' states in a slot."""
    parts = [part[slot] for layer in states.layers.values() for part in (layer.conv, layer.recurrent)]
    return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])


def test_a_snapshot_of_a_state_is_the_same_bits_and_no_other_slots_or_pages() -> None:
    """Parts of odd sizes, which end within pages; layers of one shape and of others, in turns."""
    both, conv = StateShape(57, 4, 9, 17, 5), StateShape(33, 3)
    base = Shapes(dtype=torch.bfloat16, states={0: both, 1: conv, 3: both, 4: StateShape(heads=3, keys=5, values=7)})
    kv, chance = KvCache.for_base(base, 256, 4, sequences=3), torch.Generator().manual_seed(0)
    assert kv.states is not None and kv.snapshots is not None and kv.state_pages > 2
    for layer in kv.states.layers.values():
        for part in (layer.conv, layer.recurrent):
            part.random_(0, 256, generator=chance)
    slots = [bits(kv.states, slot) for slot in range(5)]
    taken = kv.allocate(3 * kv.state_pages)
    assert taken is not None
    pages = taken[::-3]  # in any order
    kv.snapshots.save(1, pages)
    written = [page for page in taken if kv.buffer.bytes[page].any()]
    assert sorted(written) == sorted(pages)
    kv.snapshots.save(0, [page for page in taken if page not in pages][: kv.state_pages])
    kv.snapshots.restore(2, pages)
    found = [bits(kv.states, slot) for slot in range(5)]
    expected = [slots[0], slots[1], slots[1], *slots[3:]]
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * 5


def test_pages_that_a_step_copies_are_not_quiet_until_it_has_ended() -> None:
    """They may be free, and an adapter's, at the next launch; a step has ended at the launch of the next but one."""
    kv = KvCache.for_base(Shapes(states={0: StateShape(32, 4)}), 256, 4)
    span, _ = kv.buffer.allocate_span(2) or pytest.fail("expected a free run")
    kv.buffer.pool.release_span(span)
    pages = kv.allocate(kv.state_pages)
    assert pages is not None and kv.snapshots is not None
    kv.buffer.step_begins()
    assert kv.buffer.is_quiet(span)
    kv.snapshots.save(0, pages)
    kv.free(pages)
    kv.buffer.step_begins()
    assert not kv.buffer.is_quiet(span)
    kv.buffer.step_begins()
    assert kv.buffer.is_quiet(span)
