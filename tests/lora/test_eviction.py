"""The order in which copies leave: the least used for its size, and what was popular once in the end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coserve.lora.store.host import GreedyDual

BIG, SMALL = 64 << 20, 1 << 20


def test_the_less_used_and_among_equals_the_larger_and_the_older_leave_first() -> None:
    order = GreedyDual[str]()
    for key, size, uses in (("often", BIG, 40), ("big", BIG, 1), ("small", SMALL, 1), ("old", BIG, 1), ("big", BIG, 0)):
        order.used(key, size, uses)
    assert [order.pop(lambda _: True) for _ in range(4)] == ["old", "big", "small", "often"]
    assert order.pop(lambda _: True) is None


def test_what_was_popular_once_leaves_in_the_end() -> None:
    order = GreedyDual[str]()
    order.used("once", SMALL, 20)
    for number in range(100):
        order.used(f"new {number}", SMALL)
        if order.pop(lambda _: True) == "once":
            break
    assert 10 < number < 60


@given(st.lists(st.tuples(st.sampled_from(["use", "keep", "leave", "pop"]), st.integers(0, 9)), max_size=200))
def test_each_copy_leaves_once_and_none_that_is_held(steps: list[tuple[str, int]]) -> None:
    order, present, held = GreedyDual[int](), set[int](), set[int]()
    for what, key in steps:
        if what == "use":
            order.used(key, 1 + key)
            present.add(key)
        elif what == "keep":
            held ^= {key}
        elif what == "leave":
            order.left(key)
            present.discard(key)
        else:
            gone = order.pop((present - held).__contains__)
            assert (gone is None) == (not present - held)
            assert gone is None or gone in present - held
            present.discard(gone if gone is not None else -1)
