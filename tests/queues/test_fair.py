"""Deficit round robin against a simulation of the turns, and its guarantees for flows with few items."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Hashable
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from coserve.queues.fair import DeficitRoundRobin
from tests.support.examples import examples
from tests.support.work import lines_of


class Turns:
    """The paper's figure 2, turn for turn, with cancels."""

    def __init__(self, quantum: int) -> None:
        self.quantum = quantum
        self.round = deque[Hashable]()  # next turn first; the flow whose turn is under way stands first
        self.under_way = False
        self.flows = dict[Hashable, deque[tuple[str, int]]]()
        self.credit = dict[Hashable, int]()

    def push(self, key: Hashable, id: str, cost: int) -> None:
        if key not in self.flows:
            self.flows[key], self.credit[key] = deque(), 0
            self.round.append(key)
        self.flows[key].append((id, cost))

    def remove(self, key: Hashable, id: str) -> None:
        self.flows[key] = deque(entry for entry in self.flows[key] if entry[0] != id)
        self._drop_if_empty(key)

    def _drop_if_empty(self, key: Hashable) -> None:
        if not self.flows[key]:
            self.under_way = self.under_way and self.round[0] != key
            self.round.remove(key)
            del self.flows[key], self.credit[key]

    def take_one(self) -> str | None:
        while self.round:
            key = self.round[0]
            if not self.under_way:
                self.under_way = True
                self.credit[key] += self.quantum
            id, cost = self.flows[key][0]
            if cost <= self.credit[key]:
                self.flows[key].popleft()
                self.credit[key] -= cost
                self._drop_if_empty(key)
                return id
            self.under_way = False
            self.round.rotate(-1)
        return None


class FairAgainstTurns(RuleBasedStateMachine):
    @initialize(quantum=st.integers(1, 12))
    def start(self, quantum: int) -> None:
        self.fair, self.turns = DeficitRoundRobin[str](quantum), Turns(quantum)
        self.flow_of = dict[str, str]()
        self.made = 0

    @rule(key=st.sampled_from("abcd"), costs=st.lists(st.integers(0, 30), min_size=1, max_size=4))
    def push(self, key: str, costs: list[int]) -> None:
        for cost in costs:
            id = f"{key}{self.made}"
            self.made += 1
            self.flow_of[id] = key
            self.fair.push(key, id, cost, id)
            self.turns.push(key, id, cost)

    @rule(count=st.integers(0, 6))
    def take(self, count: int) -> None:
        promised = self.fair.first(count)
        taken = self.fair.pop(count)
        assert tuple(taken) == promised
        assert taken == [id for _ in range(count) if (id := self.turns.take_one()) is not None]
        for id in taken:
            del self.flow_of[id]

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.flow_of:
            gone = dict[Hashable, list[str]]()
            for id in data.draw(st.sets(st.sampled_from(sorted(self.flow_of)))):
                key = self.flow_of.pop(id)
                gone.setdefault(key, []).append(id)
                self.turns.remove(key, id)
            self.fair.remove(gone)

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "fair"):
            assert sorted(self.fair.first(99)) == sorted(self.flow_of)
            for key in "abcd":
                own = [id for id, flow in self.flow_of.items() if flow == key]
                assert self.fair.waiting(key) == len(own)
                assert [id for id in self.fair.first(99) if id[0] == key] == own, "first come first within a flow"
                if own:
                    assert self.fair.before_last(key) == self.fair.first(99).index(own[-1])
            if self.flow_of:
                key, last = next(self.fair.longest_first())
                assert self.fair.waiting(key) == max(map(self.fair.waiting, "abcd"))
                assert [id for id in self.flow_of if id[0] == key][-1] == last


TestFairAgainstTurns = FairAgainstTurns.TestCase
TestFairAgainstTurns.settings = settings(max_examples=examples(150), stateful_step_count=30, deadline=None)


@settings(deadline=None)
@given(
    seed=st.integers(0, 10_000),
    others=st.integers(1, 6),
    quantum=st.integers(1, 200),
    most=st.integers(1, 300),
    cost=st.integers(1, 300),
)
def test_one_who_asks_for_little_waits_for_rounds_whatever_the_others_do(
    seed: int, others: int, quantum: int, most: int, cost: int
) -> None:
    """Others fill the queue before and after; what they get meanwhile is bounded by turns and quanta, not by what they
    ask."""
    chance, fair = random.Random(seed), DeficitRoundRobin[tuple[str, int]](quantum)
    made = 0

    def flood(count: int) -> None:
        nonlocal made
        for _ in range(count):
            made += 1
            entry = (f"hot{chance.randrange(others)}", chance.randint(1, most))
            fair.push(entry[0], str(made), entry[1], entry)

    flood(chance.randint(0, 200))
    fair.pop(chance.randint(0, 100))
    fair.push("light", "it", cost, ("light", cost))
    spent = dict[str, int]()
    while True:
        (entry,) = fair.pop(1)
        if entry[0] == "light":
            break
        spent[entry[0]] = spent.get(entry[0], 0) + entry[1]
        flood(2)
    turns = ceil(cost / quantum)
    for own in spent.values():
        assert own < (turns + 1) * quantum + most


@given(st.integers(1, 50), st.integers(2, 6), st.integers(1, 40))
def test_flows_that_always_ask_share_evenly(quantum: int, flows: int, most: int) -> None:
    chance, fair = random.Random(quantum), DeficitRoundRobin[tuple[int, int]](quantum)
    for i in range(400):
        for flow in range(flows):
            cost = chance.randint(1, most if flow else 1)  # the first asks for many small things
            fair.push(flow, f"{flow} {i}", cost, (flow, cost))
    spent = [0] * flows
    while sum(spent) < 150 * flows:
        flow, cost = fair.pop(1)[0]
        spent[flow] += cost
    assert max(spent) - min(spent) <= 2 * quantum + most


def test_costs_far_beyond_the_quantum_take_no_time() -> None:
    fair = DeficitRoundRobin[str](1)
    for key, cost in (("a", 10**15), ("b", 10**15 - 1), ("c", 3)):
        fair.push(key, key, cost, key)
    assert fair.pop(3) == ["c", "b", "a"]


def test_an_id_waits_once() -> None:
    fair = DeficitRoundRobin[str](1)
    fair.push("a", "x", 1, "x")
    with pytest.raises(AssertionError):
        fair.push("a", "x", 1, "x")


def test_an_item_leaves_with_as_little_work_whether_few_or_many_flows_wait() -> None:
    def lines(flows: int) -> int:
        fair = DeficitRoundRobin[int](256)
        for number in range(flows):
            fair.push(number, f"i{number}", 320, number)
        return lines_of(lambda: fair.pop(1))

    assert lines(400) == lines(4)
