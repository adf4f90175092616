"""Deficit round robin (Shreedhar and Varghese, SIGCOMM '95). Pure: no torch, no IO, no clock.

Flows take turns. A turn adds a quantum to the flow's credit; then the flow's items leave, first come first served,
while the credit covers their cost. Unused credit stays for the next turn, unless the flow is empty. So each flow gets a
quantum of every round, whatever the others do.

The turns are computed, not played. If an item and those before it in its flow cost `c` together, it leaves in the
flow's turn number `ceil((c - credit) / quantum)` from now. Sorting by turn, then by position in the round, gives the
order of the turns, also for a quantum much smaller than the costs. Turns that all flows have had are counted once for
all, so it costs no more where many flows wait.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class _Flow(Generic[T]):
    key: Hashable
    position: int
    """Position in the round, increasing."""
    spent: int
    """Cost of the items that have left, plus the quanta of all turns before the flow existed. The credit is the quanta
    of all turns so far, less this."""
    turns: int = 0
    """Turns so far, beyond those that all flows have had (`DeficitRoundRobin._turns`)."""
    cost: int = 0
    """Total cost of its items."""
    items: dict[str, tuple[T, int]] = field(default_factory=dict)
    """Each item and its cost by id, oldest first."""


class _Due(NamedTuple, Generic[T]):
    """An item and the number of its flow's turn in which it leaves, counted from the start."""

    turn: int
    flow: _Flow[T]
    id: str
    item: T

    @property
    def order(self) -> tuple[int, int]:
        return self.turn - self.flow.turns, self.flow.position


class DeficitRoundRobin(Generic[T]):
    """Waiting items with unique ids. Items with the same key are one flow."""

    def __init__(self, quantum: int) -> None:
        assert quantum >= 1, quantum
        self._quantum = quantum
        self._flows: dict[Hashable, _Flow[T]] = {}
        self._round: deque[_Flow[T]] = deque()
        """Flows in the order of their next turns. A flow in the middle of its turn is last."""
        self._turns = 0
        """Turns that every flow has had."""
        self._mid_turn = False
        """Whether the last flow of the round is in the middle of its turn."""
        self._due: list[_Due[T]] = []
        """All items in the order in which they leave."""

    def push(self, key: Hashable, id: str, cost: int, item: T) -> None:
        """Append an item to its flow. A new flow has its first turn after all others."""
        assert cost >= 0, cost
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = _Flow(key, 0, spent=self._turns * self._quantum)
            mid_turn = self._round.pop() if self._mid_turn else None
            self._append(flow)
            if mid_turn is not None:
                self._append(mid_turn)
        assert id not in flow.items, id
        flow.items[id] = item, cost
        flow.cost += cost
        insort(self._due, self._schedule(flow, id, item, flow.cost), key=_order)

    def _append(self, flow: _Flow[T]) -> None:
        flow.position = self._round[-1].position + 1 if self._round else 0
        self._round.append(flow)

    def remove(self, gone: Mapping[Hashable, Collection[str]]) -> None:
        """Remove items, given as ids by flow. Later items of these flows may leave earlier."""
        if len(gone) == 1 and self._removed_last(*next(iter(gone.items()))):
            return
        flows = {self._flows[key] for key in gone}
        self._due = [due for due in self._due if due.flow not in flows]
        for flow in flows:
            for id in gone[flow.key]:
                del flow.items[id]
            flow.cost = 0
            for other, (item, cost) in flow.items.items():
                flow.cost += cost
                self._due.append(self._schedule(flow, other, item, flow.cost))
        self._due.sort(key=_order)
        if any(not flow.items for flow in flows):
            self._mid_turn = self._mid_turn and bool(self._round[-1].items)
            self._drop_empty()

    def _removed_last(self, key: Hashable, ids: Collection[str]) -> bool:
        """Remove the item if it is the newest of a flow with others, which changes no turn; return whether it was."""
        flow = self._flows[key]
        newest = next(reversed(flow.items))
        if len(flow.items) == 1 or list(ids) != [newest]:
            return False
        del self._due[self.before_last(key)]
        flow.cost -= flow.items.pop(newest)[1]
        return True

    def __len__(self) -> int:
        return len(self._due)

    def __iter__(self) -> Iterator[T]:
        """All items in the order in which they leave."""
        return (due.item for due in self._due)

    def waiting(self, key: Hashable) -> int:
        return len(flow.items) if (flow := self._flows.get(key)) is not None else 0

    def before_last(self, key: Hashable) -> int:
        """How many items leave before the newest one of a flow."""
        return bisect_right(self._due, self._last(self._flows[key]).order, key=_order) - 1

    def _last(self, flow: _Flow[T]) -> _Due[T]:
        id = next(reversed(flow.items))
        return self._schedule(flow, id, flow.items[id][0], flow.cost)

    def longest_first(self) -> Iterator[tuple[Hashable, str]]:
        """Keys and ids of all items: flows with the most items first, within a flow the newest first."""
        for flow in sorted(self._round, key=lambda flow: len(flow.items), reverse=True):
            for id in reversed(flow.items):
                yield flow.key, id

    def first(self, count: int) -> tuple[T, ...]:
        """The items that `pop` would return."""
        return tuple([due.item for due in self._due[:count]])

    def pop(self, count: int) -> list[T]:
        """Remove and return the first `count` items, or all if fewer wait."""
        popped = self._due[:count]
        if not popped:
            return []
        del self._due[:count]
        last = popped[-1]
        turns = last.turn - last.flow.turns - self._turns
        for due in popped:
            _, cost = due.flow.items.pop(due.id)
            due.flow.spent += cost
            due.flow.cost -= cost
        if turns:
            self._turns += turns - 1
            self._continue_after(last.flow)
        elif not last.flow.items:  # it was last in the round, in the middle of its turn
            self._round.pop()
            del self._flows[last.flow.key]
        self._mid_turn = bool(last.flow.items)
        if any(not due.flow.items and due.flow.key in self._flows for due in popped):
            self._drop_empty()
        return [due.item for due in popped]

    def _continue_after(self, last: _Flow[T]) -> None:
        """Give the flows up to `last` one more turn than the others: they go to the end of the round, or leave it if
        empty."""
        flow = None
        while flow is not last:
            flow = self._round.popleft()
            flow.turns += 1
            if flow.items:
                self._append(flow)
            else:
                del self._flows[flow.key]

    def _drop_empty(self) -> None:
        flows, self._round = self._round, deque()
        for flow in flows:
            if flow.items:
                self._append(flow)
            else:
                del self._flows[flow.key]

    def _schedule(self, flow: _Flow[T], id: str, item: T, cost: int) -> _Due[T]:
        """Compute the item's turn. `cost`: total of the item and all before it in its flow."""
        now = self._turns + flow.turns
        mid_turn = self._mid_turn and flow is self._round[-1]
        turns = -(-(flow.spent + cost - now * self._quantum) // self._quantum)
        return _Due(now + max(0 if mid_turn else 1, turns), flow, id, item)


def _order(due: _Due[T]) -> tuple[int, int]:
    return due.order
