"""Which tokens the next step computes, and who holds pages for them. Pure bookkeeping: no tensors.

Iteration-level batching (Orca, OSDI '22 §3.1) with chunked prefill (Sarathi-Serve, OSDI '24 §4.2) and preemption by
recomputation (vLLM, SOSP '23 §4.5).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from coserve.generate.sequences import Sequence


class PageSource(Protocol):
    """What the scheduler needs of `memory.KvCache`."""

    def take(self, n: int) -> list[int] | None: ...
    def give(self, pages: Items[int]) -> None: ...
    def pages_for(self, tokens: int) -> int: ...


@dataclass(frozen=True)
class Share:
    """The next `tokens` tokens of a sequence, computed in one step."""

    sequence: Sequence
    tokens: int


class Scheduler:
    """First come, first served. A sequence is waiting (no pages) or active (it holds pages).

    A sequence becomes active when the pool has pages for all its tokens so far; later it takes one page at a time, and
    when there is none the latest arrival gives up its pages and waits again, ahead of those that came after it. The
    earliest is never made to wait for pages, and every sequence fits the pool alone: so all of them end.
    """

    def __init__(self, pages: PageSource, *, max_running: int, step_tokens: int) -> None:
        self._pages, self._max_running, self._step_tokens = pages, max_running, step_tokens
        self._waiting: list[Sequence] = []
        self._active: list[Sequence] = []
        self._step = 0
        self.preemptions = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._active)

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in line. Its tokens up to `max_tokens` must fit the pool."""
        insort(self._waiting, sequence, key=_arrival)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and free its pages."""
        (self._active if sequence in self._active else self._waiting).remove(sequence)
        self._release(sequence)

    def plan(self) -> list[Share]:
        """At most `step_tokens` tokens, one share a sequence: decodes, then prompts under way, then new ones.

        Decodes that did not fit into the last step come first in this one. The pages for all shares are taken.
        """
        self._step += 1
        before = self.preemptions
        shares = self._decodes()
        budget = self._step_tokens - len(shares)
        for sequence in self._active:
            if budget and sequence.pending > 1:
                budget -= self._give_share(shares, sequence, budget)
        while budget and self._waiting and self.preemptions == before and (admitted := self._admit()):
            budget -= self._give_share(shares, admitted, budget)
        return list(shares.values())

    def _decodes(self) -> dict[str, Share]:
        shares: dict[str, Share] = {}
        ready = [sequence for sequence in self._active if sequence.pending == 1]
        for sequence in sorted(ready, key=lambda s: (s.last_step, s.arrival)):
            if len(shares) == self._step_tokens:
                break
            if sequence in self._active and self._grow(sequence, shares):
                self._give_share(shares, sequence, 1)
        return shares

    def _give_share(self, shares: dict[str, Share], sequence: Sequence, budget: int) -> int:
        tokens = min(budget, sequence.pending)
        shares[sequence.id] = Share(sequence, tokens)
        sequence.last_step = self._step
        return tokens

    def _grow(self, sequence: Sequence, shares: dict[str, Share]) -> bool:
        """A page for the next token if it needs one; False when the sequence had to give up its own."""
        need = self._pages.pages_for(len(sequence.tokens)) - len(sequence.pages)
        while (pages := self._pages.take(need)) is None:
            victim = self._active[-1]
            assert victim is not sequence or len(self._active) > 1, "a sequence alone does not fit the pool"
            self._preempt(victim)
            shares.pop(victim.id, None)
            if victim is sequence:
                return False
        sequence.pages.extend(pages)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._active.remove(sequence)
        self._release(sequence)
        self.add(sequence)
        self.preemptions += 1

    def _admit(self) -> Sequence | None:
        """Make the first in line active, if there is room and all its tokens find pages."""
        if len(self._active) >= self._max_running:
            return None
        sequence = self._waiting[0]
        pages = self._pages.take(self._pages.pages_for(len(sequence.tokens)))
        if pages is None:
            return None
        self._waiting.pop(0)
        sequence.pages = pages
        insort(self._active, sequence, key=_arrival)
        return sequence

    def _release(self, sequence: Sequence) -> None:
        self._pages.give(sequence.pages)
        sequence.pages = []
        sequence.computed = 0


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
