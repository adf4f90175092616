"""Deficit round robin (Shreedhar and Varghese, SIGCOMM '95): whose turn it is. Pure: no torch, no IO, no clock.

Flows take turns. A turn adds a quantum to the flow's credit, and its items go, first come first, while the credit covers
their cost; what is left of the credit stays for the next turn, unless nothing of the flow waits any more. Whatever the
others do, a flow gets a quantum's worth of every round.

The turns are not played one after another. An item whose cost and those before it in its flow sum to `c` goes in the
flow's turn number `ceil((c - credit) / quantum)` from now: ordering by turn, then by place in the round, gives what the
turns would give, however small the quantum is beside the costs.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class _Flow(Generic[T]):
    key: Hashable
    place: int = 0
    """In the round."""
    turns: int = 0
    """Turns that it has had."""
    credit: int = 0
    owed: int = 0
    """Cost of all its items."""
    items: dict[str, tuple[T, int]] = field(default_factory=dict)
    """And what each costs, first come first."""


class _Due(NamedTuple, Generic[T]):
    """When an item goes: in that turn of its flow, counted like the flow's own."""

    turn: int
    flow: _Flow[T]
    id: str
    item: T

    @property
    def order(self) -> tuple[int, int]:
        return self.turn - self.flow.turns, self.flow.place


class DeficitRoundRobin(Generic[T]):
    """Items that wait, each with an id of its own, in the flows of their keys."""

    def __init__(self, quantum: int) -> None:
        assert quantum >= 1, quantum
        self._quantum = quantum
        self._flows: dict[Hashable, _Flow[T]] = {}
        self._round: list[_Flow[T]] = []
        """Next turn first. A flow whose turn is under way stands last: its next whole turn comes after all others'."""
        self._under_way = False
        self._due: list[_Due[T]] = []
        """All items in their order."""

    def push(self, key: Hashable, id: str, cost: int, item: T) -> None:
        """An item behind those of its flow. A flow that had none has its turn after all others have had theirs."""
        assert cost >= 0, cost
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = _Flow(key)
            self._round.insert(len(self._round) - self._under_way, flow)
            self._number()
        assert id not in flow.items, id
        flow.items[id] = item, cost
        flow.owed += cost
        insort(self._due, self._when(flow, id, item, flow.owed), key=_order)

    def remove(self, key: Hashable, id: str) -> None:
        """Forget an item wherever it stands. Those behind it in its flow may go earlier."""
        flow = self._flows[key]
        del flow.items[id]
        self._due = [due for due in self._due if due.flow is not flow]
        flow.owed = 0
        for other, (item, cost) in flow.items.items():
            flow.owed += cost
            self._due.append(self._when(flow, other, item, flow.owed))
        self._due.sort(key=_order)
        if not flow.items:
            self._under_way = self._under_way and flow is not self._round[-1]
            self._round.remove(flow)
            del self._flows[key]
            self._number()

    def waiting(self, key: Hashable) -> int:
        """How many items of a flow wait."""
        return len(flow.items) if (flow := self._flows.get(key)) is not None else 0

    def longest(self) -> tuple[Hashable, str]:
        """The flow with the most items, and the last of them. There must be one."""
        flow = max(self._round, key=lambda flow: len(flow.items))
        return flow.key, next(reversed(flow.items))

    def order(self) -> tuple[T, ...]:
        """All that wait, in the order in which `take` will take them unless others come or go."""
        return tuple(due.item for due in self._due)

    def take(self, count: int) -> list[T]:
        """Remove and return the first `count` of the order, fewer if fewer wait."""
        taken = self._due[:count]
        if not taken:
            return []
        del self._due[:count]
        turn, last = taken[-1].order
        for flow in self._round:
            turns = turn if flow.place <= last else turn - 1
            flow.turns += turns
            flow.credit += turns * self._quantum
        for due in taken:
            _, cost = due.flow.items.pop(due.id)
            due.flow.credit -= cost
            due.flow.owed -= cost
        self._go_on(last)
        return [due.item for due in taken]

    def _go_on(self, last: int) -> None:
        """The latest item was of the flow in place `last`: the round goes on from there, without flows that are empty."""
        latest = self._round[last]
        turned = self._round[last + 1 :] + self._round[: last + 1]
        for flow in turned:
            if not flow.items:
                del self._flows[flow.key]
        self._round = [flow for flow in turned if flow.items]
        self._under_way = bool(latest.items)
        self._number()

    def _number(self) -> None:
        for place, flow in enumerate(self._round):
            flow.place = place

    def _when(self, flow: _Flow[T], id: str, item: T, owed: int) -> _Due[T]:
        """`owed`: what the item and all before it in its flow cost."""
        under_way = self._under_way and flow is self._round[-1]
        turns = -(-(owed - flow.credit) // self._quantum)
        return _Due(flow.turns + max(0 if under_way else 1, turns), flow, id, item)


def _order(due: _Due[T]) -> tuple[int, int]:
    return due.order
