"""The pages of snapshots of recurrent states, without a model."""

from __future__ import annotations

from collections.abc import Sequence

from coserve.core.link.generation import Generate
from coserve.core.sampling import SamplingParams
from coserve.core.types import Slo
from coserve.generate.schedule import Scheduler
from coserve.generate.snapshots import Snapshots
from coserve.memory.prefix import PageKeys
from coserve.memory.state_pool import StateSlots
from coserve.queues.request import Request, Snapshot
from tests.support.pages import BareAdapters, BarePages, next_scheduled

PAGE_TOKENS = 4


class CountedKeys(PageKeys):
    """Counts the keys that it returns."""

    given = 0

    def first(self, pages: int, tokens: Sequence[int]) -> Sequence[bytes]:
        keys = super().first(pages, tokens)
        self.given += len(keys)
        return keys


class States(BarePages):
    """Pages of a base with recurrent states."""

    def __init__(self, pages: int, state_pages: int) -> None:
        super().__init__(pages, PAGE_TOKENS)
        self.state_pages = state_pages


def request(id: str, prompt: Sequence[int], max_tokens: int = 1) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(Generate(id=id, prompt=tuple(prompt), sampling=params, adapter=None, slo=Slo(ttft=1, tpot=1)))


def give_keys(one: Request) -> None:
    one.keys = CountedKeys(PAGE_TOKENS, base="base", adapter=None)


def scheduler_of(pages: BarePages) -> Scheduler:
    return Scheduler(pages, BareAdapters(), max_running=4, step_tokens=1 << 14, states=StateSlots(4), prepare=give_keys)


def step(scheduler: Scheduler) -> list[tuple[str, int]]:
    """Compute a step. Return each request's tokens."""
    scheduled = next_scheduled(scheduler)
    for item in scheduled:
        item.request.computed += item.tokens
    scheduler.changed()
    return [(item.request.id, item.tokens) for item in scheduled]


def test_a_long_prefix_without_a_snapshot_is_searched_once() -> None:
    """The time of a search is the tick's: it grows with the pages, not with their square."""
    pages, prompt = States(2010, 100), range(8001)
    scheduler = scheduler_of(pages)
    first, second = request("first", prompt), request("second", prompt)
    scheduler.add(first)
    step(scheduler)
    scheduler.remove(first)
    scheduler.add(second)
    assert step(scheduler) == [("second", 7996)], "the whole prompt, up to the place of its snapshot"
    assert isinstance(second.keys, CountedKeys)
    assert second.keys.given < 10 * 2000


def test_a_snapshot_has_no_pages_of_an_earlier_one_that_was_evicted_in_part() -> None:
    """Its last piece is left alone among pages in use when an adapter takes the run with its first one."""
    pages = States(10, 2)
    snapshots = Snapshots(pages)
    head, empty, tail = 4, 5, 0
    assert pages.allocate(10) == list(range(10))
    pages.free([empty])
    for taken in ([head, tail], [head, empty]):
        own = request("any", range(9))
        give_keys(own)
        own.saved, own.computed = Snapshot(PAGE_TOKENS, taken), PAGE_TOKENS
        snapshots.settle(own)
        if tail in taken:
            allocated = pages.pool.allocate_span(2)
            assert allocated is not None
            span, moved = allocated
            assert (span.first, moved) == (head, {})
            pages.pool.release_span(span)
            pages.pool.drop_span(span)
            assert pages.allocate(2) == [head, empty]
    found = [1]
    pages.hold(found)
    assert snapshots.find(own, found) == [head, empty]
    pages.pool.check_integrity()


def test_a_snapshot_that_is_being_read_counts_as_free_for_what_comes_later() -> None:
    """Both answers fit as soon as their first step has read the snapshot: the second waits for no end of the first."""
    pages, start = States(24, 8), list(range(41))
    scheduler = scheduler_of(pages)
    first = request("first", start)
    scheduler.add(first)
    for _ in range(2):
        step(scheduler)
    scheduler.remove(first)
    for number in range(2):
        scheduler.add(request(str(number), [*start, number, 0, 0], max_tokens=17))
    assert step(scheduler) == [("0", 4), ("1", 4)]
