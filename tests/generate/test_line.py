"""Requests that wait for pages: whose adapter is in pages passes whose adapter finds no room, for a bounded time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coserve.core.link.generation import Generate
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef, Slo
from coserve.generate.line import PASSED_SECONDS
from coserve.generate.schedule import Scheduler
from coserve.queues.request import Request
from tests.support.examples import examples
from tests.support.pages import BarePages, FewAdapters, next_scheduled


class Line:
    """A scheduler with room for few adapters, and pages for all tokens. Each of its requests is `name` and its
    adapter: `a1` has adapter `a`, `1` has none."""

    def __init__(self, places: int, running: int = 64) -> None:
        self.adapters = FewAdapters(places)
        self.scheduler = Scheduler(BarePages(1 << 14, 16), self.adapters, max_running=running, step_tokens=1000)

    def add(self, *names: str, tokens: int = 99) -> list[Request]:
        for name in names:
            adapter = name.rstrip("0123456789")
            message = Generate(
                id=name,
                prompt=(1, 2),
                sampling=SamplingParams(max_tokens=tokens),
                adapter=AdapterRef(adapter, 1) if adapter else None,
                slo=Slo(ttft=1, tpot=1),
            )
            self.scheduler.add(Request(message))
        return [self.scheduler.requests[name] for name in names]

    def step(self, now: float = 0.0) -> list[str]:
        """Returns which requests became active in it."""
        begun = list[str]()
        for share in next_scheduled(self.scheduler, now):
            own = share.request
            begun += [] if own.computed else [own.id]
            own.computed += share.tokens
            if own.push(1) is not None:
                self.scheduler.remove(own)
        self.scheduler.changed()
        return begun

    def end(self, *names: str) -> None:
        for name in names:
            self.scheduler.remove(self.scheduler.requests[name])


def test_whose_adapter_is_in_pages_passes_whose_adapter_finds_no_room() -> None:
    line = Line(places=1)
    line.add("a1", "b2", "a3", "c4", "5")
    assert line.step() == ["a1", "a3", "5"]
    line.end("a1", "a3")
    assert line.step() == ["b2"], "c4 has waited for less"
    line.end("b2")
    assert line.step() == ["c4"]


def test_nobody_is_passed_for_longer_than_the_bound() -> None:
    line = Line(places=1)
    line.add("a1", "b2")
    assert line.step(now=7.0) == ["a1"]
    line.add("a3", "4")
    assert line.step(now=7.0 + PASSED_SECONDS) == ["a3", "4"]
    line.add("a5", "6")
    assert line.step(now=7.01 + PASSED_SECONDS) == []
    line.end("a1")
    assert line.step(now=8.0 + PASSED_SECONDS) == []
    line.end("a3")
    assert line.step(now=9.0 + PASSED_SECONDS) == ["b2", "6"], "b2 is in, and a5's adapter is not in pages any more"


def test_whose_adapter_is_read_again_is_passed_by_all() -> None:
    line = Line(places=2)
    line.add("a1", "b2", "3")
    line.adapters.unread.add(AdapterRef("a", 1))
    assert not line.scheduler.propose().blocked
    assert line.step() == ["b2", "3"]
    line.end("b2", "3")
    assert line.scheduler.propose().blocked, "a step would compute nothing"
    line.adapters.unread.clear()
    assert not line.scheduler.propose().blocked
    assert line.step() == ["a1"]


def test_who_is_passed_keeps_no_others_in_the_queue() -> None:
    """Few may wait for pages while they are short. They are short here for new adapters alone."""
    line = Line(places=1, running=32)
    line.add("a1", *(f"{name}2" for name in "bcdefghi"))
    assert line.step() == ["a1"]
    line.add("a3")
    assert line.step() == ["a3"]
    assert line.scheduler.places > 0


@pytest.mark.parametrize("ends", ["active", "waiting"])
def test_who_leaves_the_line_leaves_no_bound_behind(ends: str) -> None:
    line = Line(places=1)
    line.add("a1", "b2")
    line.step(now=0.0)
    line.end("b2" if ends == "waiting" else "a1")
    line.step(now=1.0)
    (late,) = line.add("c3")
    line.step(now=2.0)
    assert late.passed_since == 2.0


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 10_000), places=st.integers(1, 5), running=st.integers(1, 8), seconds=st.floats(0.01, 0.4))
def test_order_and_bound_hold_in_random_traffic(seed: int, places: int, running: int, seconds: float) -> None:
    """Nobody passes who waited too long, none passes with an adapter that was not in pages, and all end."""
    chance, line, now = random.Random(seed), Line(places, running), 0.0
    live, since, arrivals = set[str](), dict[str, float](), 0
    while arrivals < 50 or live:
        if arrivals < 50 and chance.random() < 0.6:
            name = f"{chance.choice(['a', 'b', 'c', 'd', 'e', 'f', 'g', ''])}{arrivals}"
            line.add(name, tokens=chance.randint(1, 12))
            live.add(name)
            arrivals += 1
        if live and arrivals < 50 and chance.random() < 0.05:
            line.end(gone := chance.choice(sorted(live)))
            live.remove(gone)
        waiting = [each for each in line.scheduler.requests.values() if not each.pages]
        in_pages = set[AdapterRef | None](line.adapters.users)
        begun = line.step(now)
        for own in (each for name in begun for each in waiting if each.id == name):
            for other in (each for each in waiting if each.number < own.number and each.id not in begun):
                assert now - since.setdefault(other.id, now) <= PASSED_SECONDS
                assert own.adapter is None or own.adapter in in_pages
            in_pages.add(own.adapter)
        live &= set(line.scheduler.requests)
        now += seconds
    assert (len(line.scheduler), line.adapters.users) == (0, {})


def test_waits_are_bounded_in_virtual_time_with_ten_thousand_adapters() -> None:
    """A few hot adapters have half of the requests and are always in pages. A request of another one that is first in
    line waits for the bound at most, and then until one of those that run has ended."""
    step, tokens, places = 0.03, 10, 16
    chance, line, now = random.Random(0), Line(places, running=200), 0.0
    first_since, waits, made, due = dict[str, float](), dict[str, float](), 0, 0.0
    while made < 3000 or len(line.scheduler):
        while made < 3000 and due <= now:
            kind = f"hot{'abcdefghijkl'[chance.randrange(12)]}" if chance.random() < 0.5 else "cold"
            number = "" if kind != "cold" else "".join("abcdefghij"[int(d)] for d in f"{chance.randrange(10_000):04}")
            line.add(f"{kind}{number}{made}", tokens=tokens)
            made += 1
            due += chance.expovariate(1 / 0.03)
        waiting = [each for each in line.scheduler.requests.values() if not each.pages]
        if waiting:
            first_since.setdefault(min(waiting, key=lambda each: each.number).id, now)
        for id in line.step(now):
            waits[id] = now - first_since.get(id, now)
        now += step
    assert len(waits) == 3000
    assert 0 < max(waits.values()) <= PASSED_SECONDS + tokens * step + 1e-6
