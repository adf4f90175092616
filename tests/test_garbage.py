"""Garbage is collected while nothing waits; in a busy process it does not grow without bound."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.core.garbage import FULL_INTERVAL, MIDDLE_INTERVAL, YOUNG_WHEN_BUSY, YOUNG_WHEN_IDLE, GarbageCollection
from tests.support.interpreter import Interpreter


@given(st.lists(st.tuples(st.integers(0, 2 * YOUNG_WHEN_BUSY), st.booleans()), max_size=60))
def test_work_is_interrupted_only_for_the_bound(turns: list[tuple[int, bool]]) -> None:
    interpreter = Interpreter()
    garbage = GarbageCollection(interpreter.collect, interpreter.count)
    for made, idle in turns:
        interpreter.counts[0] += made
        before = interpreter.count()
        interpreter.collected.clear()
        if idle:
            garbage.when_idle()
            assert 2 not in interpreter.collected
            assert interpreter.counts[0] < YOUNG_WHEN_IDLE
        else:
            garbage.while_busy()
            assert bool(interpreter.collected) == (before[0] >= YOUNG_WHEN_BUSY)
            assert interpreter.counts[0] < YOUNG_WHEN_BUSY


def test_without_an_idle_moment_there_is_a_full_collection_in_the_end() -> None:
    interpreter = Interpreter()
    garbage = GarbageCollection(interpreter.collect, interpreter.count)
    turns = 0
    while 2 not in interpreter.collected:
        interpreter.counts[0] += YOUNG_WHEN_BUSY
        garbage.while_busy()
        turns += 1
        assert interpreter.counts[1] <= MIDDLE_INTERVAL
    assert turns == (MIDDLE_INTERVAL + 1) * FULL_INTERVAL + 1


def test_a_full_collection_is_due_once_something_was_made() -> None:
    interpreter = Interpreter()
    garbage = GarbageCollection(interpreter.collect, interpreter.count)
    assert not garbage.full_due
    interpreter.counts[0] = YOUNG_WHEN_IDLE
    garbage.when_idle()
    assert garbage.full_due, "what survived may be garbage by now"
    garbage.collect_all()
    assert interpreter.collected == [0, 2]
    assert not garbage.full_due


@pytest.fixture
def quiet() -> Iterator[None]:
    """No automatic collections."""
    gc.disable()
    yield
    gc.enable()


class Knot:
    """A cycle of itself."""

    alive = 0

    def __init__(self) -> None:
        self.own = self
        Knot.alive += 1

    def __del__(self) -> None:
        Knot.alive -= 1


def test_cycles_do_not_pile_up_under_a_load_without_end(quiet: None) -> None:
    garbage, most = GarbageCollection(), 0
    for _ in range(10 * YOUNG_WHEN_BUSY):
        Knot()
        garbage.while_busy()
        most = max(most, Knot.alive)
    assert YOUNG_WHEN_BUSY // 4 < most <= YOUNG_WHEN_BUSY
