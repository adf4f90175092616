"""The scheduler against random traffic: nothing lost, nothing stuck, no page left behind, first come first served."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coserve.core.link.generation import Generate
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef, FinishReason, Slo
from coserve.generate.plan import Scheduled
from coserve.generate.schedule import Scheduler
from coserve.queues.request import Request
from tests.support.examples import examples
from tests.support.lengths import OneMoreToken
from tests.support.pages import BareAdapters, BarePages, next_scheduled

STOP = 2


def request(
    arrival: int, prompt: int, max_tokens: int, adapter: AdapterRef | None = None, *, stops: bool = False
) -> Request:
    sampling, slo = SamplingParams(max_tokens=max_tokens), Slo(ttft=1, tpot=1)
    message = Generate(id=str(arrival), prompt=(0,) * prompt, sampling=sampling, adapter=adapter, slo=slo)
    return Request(message, stop_ids=frozenset([STOP] if stops else []))


def run(scheduler: Scheduler, source: BarePages, scheduled: list[Scheduled], step_tokens: int) -> list[Request]:
    """What a forward does to the state, with every check that a plan must pass; returns who ended."""
    assert sum(item.tokens for item in scheduled) <= step_tokens
    assert len({item.request.id for item in scheduled}) == len(scheduled)
    held = [page for item in scheduled for page in item.request.pages]
    assert len(held) == len(set(held)), "a page is held twice"
    ended = []
    for item in scheduled:
        own = item.request
        assert 0 < item.tokens <= own.pending
        assert source.pages_for(own.computed + item.tokens) <= len(own.pages)
        own.computed += item.tokens
        if own.pending == 0 and own.push(1) is FinishReason.LENGTH:
            scheduler.remove(own)
            ended.append(own)
    scheduler.changed()
    source.pool.check_integrity()
    return ended


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 10_000),
    pages=st.integers(1, 20),
    page_tokens=st.integers(1, 8),
    step_tokens=st.integers(1, 40),
    max_running=st.integers(1, 8),
)
def test_everything_ends_and_nothing_is_left(
    seed: int, pages: int, page_tokens: int, step_tokens: int, max_running: int
) -> None:
    chance, source = random.Random(seed), BarePages(pages, page_tokens)
    scheduler = Scheduler(source, BareAdapters(), max_running=max_running, step_tokens=step_tokens)
    live: dict[str, Request] = {}
    ended, arrivals = 0, 0
    room = pages * page_tokens
    while arrivals < 60 or live:
        if arrivals < 60 and chance.random() < 0.5:
            prompt = chance.randint(1, room)
            new = request(arrivals, prompt, chance.randint(1, room - prompt + 1))
            arrivals += 1
            live[new.id] = new
            scheduler.add(new)
        if live and arrivals < 60 and chance.random() < 0.05:
            gone = live.pop(chance.choice(list(live)))
            scheduler.remove(gone)
            assert not gone.pages
        scheduled = next_scheduled(scheduler)
        assert bool(scheduled) == bool(live), "nobody moves"
        if scheduled:
            assert min(live.values(), key=lambda s: s.number).pages, "the earliest waits"
        active = [s for s in live.values() if s.pages]
        assert len(active) <= min(max_running, step_tokens)
        for done in run(scheduler, source, scheduled, step_tokens):
            del live[done.id]
            ended += 1
        assert len(scheduler) == len(live)
    assert source.pool.used == 0


def test_a_step_loads_few_adapters() -> None:
    """Those that run wait for the copies; those that need none pass."""
    scheduler = Scheduler(BarePages(200, 4), BareAdapters(), max_running=20, step_tokens=100, loaded_bytes=150)
    for arrival, adapter in enumerate("abcdaaef"):
        scheduler.add(request(arrival, 3, 50, AdapterRef(adapter, 1)))
    started = []
    for _ in range(4):
        scheduled = next_scheduled(scheduler)
        started.append([item.request.number for item in scheduled if not item.request.computed])
        for item in scheduled:
            item.request.computed += item.tokens
            item.request.push(1)
        scheduler.changed()
    assert started == [[0, 1, 4, 5], [2, 3], [6, 7], []]


def of_class(id: str, *, batch: bool) -> Request:
    slo = Slo(ttft=1, tpot=1, batch=batch)
    return Request(Generate(id=id, prompt=(0,), sampling=SamplingParams(max_tokens=9), adapter=None, slo=slo))


@pytest.mark.parametrize(
    ("interactive", "running"),
    [(0, 16), (1, 15), (2, 14), (9, 14), (15, 16)],  # 15: the class gets a place that is free
)
def test_the_batch_class_leaves_places_to_interactive_requests(interactive: int, running: int) -> None:
    """At most an eighth of 16, and no more than the class has."""
    scheduler = Scheduler(BarePages(99, 16), BareAdapters(), max_running=16, step_tokens=64)
    for number in range(interactive):
        scheduler.arrive(of_class(f"i{number}", batch=False))
    scheduler.commit(scheduler.propose(), now=0.0)
    for number in range(1, 20):
        scheduler.arrive(of_class(f"b{number}", batch=True))
        scheduler.commit(scheduler.propose(), now=0.0)
    assert len(scheduler) == running
    for number in range(16 - running):
        scheduler.arrive(of_class(f"new{number}", batch=False))
    scheduler.commit(scheduler.propose(), now=0.0)
    assert len(scheduler) == 16 and {each.id[0] for each in scheduler.queue.waiting(99)} == {"b"}


def test_decodes_go_before_prefill_and_chunks_fill_the_step() -> None:
    source = BarePages(100, 4)
    scheduler = Scheduler(source, BareAdapters(), max_running=8, step_tokens=10)
    for arrival, prompt in enumerate((4, 25)):
        scheduler.add(request(arrival, prompt, 50))
    plans = []
    for _ in range(4):
        scheduled = next_scheduled(scheduler)
        plans.append([(item.request.number, item.tokens) for item in scheduled])
        run(scheduler, source, scheduled, 10)
    assert plans == [[(0, 4), (1, 6)], [(0, 1), (1, 9)], [(0, 1), (1, 9)], [(0, 1), (1, 1)]]


def test_no_more_run_than_a_step_has_tokens() -> None:
    source = BarePages(100, 4)
    scheduler = Scheduler(source, BareAdapters(), max_running=5, step_tokens=2)
    for arrival in range(5):
        scheduler.add(request(arrival, 1, 20))
    ended = []
    while len(scheduler):
        scheduled = next_scheduled(scheduler)
        ended += [s.number for s in run(scheduler, source, scheduled, 2)]
    assert ended == [0, 1, 2, 3, 4]


def test_the_latest_gives_way_and_is_first_in_line_again() -> None:
    source = BarePages(4, 2)
    scheduler = Scheduler(source, BareAdapters(), max_running=4, step_tokens=16, lengths=OneMoreToken())
    first, second, third = request(0, 3, 5), request(1, 3, 5), request(2, 1, 1)
    for one in (first, second, third):
        scheduler.add(one)
    run(scheduler, source, next_scheduled(scheduler), 16)  # both have 3 + 1 tokens on 2 pages
    run(scheduler, source, next_scheduled(scheduler), 16)  # the fourth token is computed, the pages are full
    assert not third.pages
    scheduled = next_scheduled(scheduler)
    assert [item.request for item in scheduled] == [first]
    assert scheduler.preemptions == 1
    assert (second.pages, second.computed, second.generated) == ((), 0, 2)
    run(scheduler, source, scheduled, 16)
    while first.generated < 5:
        run(scheduler, source, next_scheduled(scheduler), 16)
    scheduled = next_scheduled(scheduler)
    assert [(item.request, item.tokens) for item in scheduled] == [(second, 5), (third, 1)]
    while len(scheduler):
        run(scheduler, source, scheduled, 16)
        scheduled = next_scheduled(scheduler)
    assert second.generated == 5


def test_the_one_that_grows_may_be_the_one_that_gives_way() -> None:
    source = BarePages(3, 2)
    scheduler = Scheduler(source, BareAdapters(), max_running=4, step_tokens=16, lengths=OneMoreToken())
    first, second = request(0, 3, 2), request(1, 2, 2)
    for one in (first, second):
        scheduler.add(one)
    run(scheduler, source, next_scheduled(scheduler), 16)
    scheduled = next_scheduled(scheduler)
    assert [item.request for item in scheduled] == [first]
    assert not second.pages


def test_adapters_of_steps_are_counted_in_each_step() -> None:
    source, refs = BarePages(9, 2), [None, AdapterRef("a", 1), AdapterRef("b", 1), AdapterRef("b", 1)]
    scheduler = Scheduler(source, BareAdapters(), max_running=9, step_tokens=16)
    for i, (ref, tokens) in enumerate(zip(refs, (1, 1, 1, 2), strict=True)):
        scheduler.add(request(i, 1, tokens, ref))
    while len(scheduler):
        run(scheduler, source, next_scheduled(scheduler), 16)
    assert scheduler.step_adapters == 2 + 1


def test_a_sequence_that_does_not_fit_alone_is_our_own_bug() -> None:
    source = BarePages(1, 2)
    scheduler = Scheduler(source, BareAdapters(), max_running=4, step_tokens=16)
    scheduler.add(request(0, 2, 5))
    run(scheduler, source, next_scheduled(scheduler), 16)
    with pytest.raises(AssertionError, match="alone"):
        next_scheduled(scheduler)


@settings(max_examples=examples(100), deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40), st.integers(0, 5)), min_size=1, max_size=40),
    pages=st.integers(15, 60),
    page_tokens=st.integers(5, 8),
)
def test_nothing_gives_way_where_lengths_are_known(
    sizes: list[tuple[int, int, int]], pages: int, page_tokens: int
) -> None:
    """Each comes some steps after the one before it, with a prompt that is one step's work."""
    source = BarePages(pages, page_tokens)
    scheduler = Scheduler(source, BareAdapters(), max_running=99, step_tokens=10_000)
    steps = arrival = 0
    due = 0
    while arrival < len(sizes) or len(scheduler):
        while arrival < len(sizes) and due <= steps:
            prompt, max_tokens, pause = sizes[arrival]
            scheduler.add(request(arrival, prompt, max_tokens))
            arrival += 1
            due += pause
        run(scheduler, source, next_scheduled(scheduler), 10_000)
        steps += 1
    assert scheduler.preemptions == 0


def test_as_many_run_as_past_lengths_let_hope() -> None:
    """Answers may have 1000 tokens and have about 50: the pool holds four whole ones, and many more run. Few give
    way."""
    chance, source = random.Random(0), BarePages(500, 8)
    scheduler = Scheduler(source, BareAdapters(), max_running=200, step_tokens=10_000)
    for arrival in range(1000):
        scheduler.add(request(arrival, 10, 1000, stops=True))
    ends: dict[int, int] = {}
    running = []
    while len(scheduler):
        scheduled = next_scheduled(scheduler)
        running.append(len(scheduled))
        for item in scheduled:
            own = item.request
            own.computed += item.tokens
            length = ends.setdefault(own.number, 1 + int(chance.expovariate(1 / 50)))
            if own.pending == 0 and own.push(STOP if own.generated + 1 == length else 1) is not None:
                scheduler.remove(own)
    assert sum(running[200:400]) / 200 > 40
    assert scheduler.preemptions < 100


def test_few_wait_here_while_pages_are_the_limit() -> None:
    """The others wait where they are ordered by deadlines. When there are pages again, more come at once each step."""
    source = BarePages(20, 4)
    scheduler = Scheduler(source, BareAdapters(), max_running=100, step_tokens=200)
    assert scheduler.places == 100
    for arrival in range(30):
        scheduler.add(request(arrival, 5, 12))
    rooms = []
    for arrival in range(30, 60):
        run(scheduler, source, next_scheduled(scheduler), 200)
        rooms.append(scheduler.places)
        if scheduler.places:
            scheduler.add(request(arrival, 5, 12))
    assert rooms[0] == 0
    waited = len(scheduler)
    while len(scheduler):
        run(scheduler, source, next_scheduled(scheduler), 200)
    assert waited < 30
    for _ in range(9):
        next_scheduled(scheduler)
    assert scheduler.places == 100
