"""Adapters in the pool's pages: each is one run of consecutive pages, beside the KV cache's (S-LoRA's unified paging).

S-LoRA (§4.2) cuts an adapter into pages of one vector each, and its kernels gather them. Here a page holds the keys and
values of `page_tokens` tokens in all layers (2 MiB at 8B), an adapter of rank 16 has 40 of them, and its matrices lie in
one piece: kernels read them as if there were no pages, and less than one page an adapter is lost.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from coserve.adapter_store.packing import copied_into, packed_bytes
from coserve.memory.buffer import PageBuffer
from coserve.memory.pages import Span
from coserve.model.lora import LoraWeights


@dataclass(frozen=True)
class Entered:
    """An adapter in pages, and where pages moved that were in its way."""

    weights: LoraWeights
    moved: Mapping[int, int]


@dataclass(frozen=True)
class _Placed:
    source: weakref.ref[LoraWeights]
    span: Span
    weights: LoraWeights


class AdapterPages:
    """Which adapters are in pages. A *source* is an adapter outside of the pool, known by its identity.

    An adapter that nobody is in with stays in its pages until they are needed. When it comes back after that, it is
    another `LoraWeights`: whoever kept addresses of the old one cannot take it for the new one. Pages may be written
    while a step under way still reads what they held before: `PageBuffer` says why.
    """

    def __init__(self, buffer: PageBuffer) -> None:
        self._buffer = buffer
        self._placed: dict[int, _Placed] = {}
        self._gone: list[int] = []

    @property
    def total(self) -> int:
        """Pages that hold adapters now, whether somebody is in with them or not."""
        self._sweep()
        return self._buffer.pool.in_spans

    def pages(self, source: LoraWeights) -> int:
        """Pages that the adapter takes."""
        self._sweep()
        placed = self._placed.get(id(source))  # asked for with every request: its matrices are counted once
        return max(1, self._buffer.pages_for(packed_bytes(source))) if placed is None else placed.span.pages

    def needs(self, source: LoraWeights) -> int:
        """Pages, of those that are free now, that `enter` takes: none if somebody holds the adapter already."""
        self._sweep()
        placed = self._placed.get(id(source))
        held = placed is not None and placed.span.holders > 0
        return 0 if held else self.pages(source)

    def enter(self, source: LoraWeights) -> Entered | None:
        """The adapter in pages, until as many calls of `leave`; None if there is no room for it now.

        There is whenever `needs` pages are free, unless other held adapters cut the pool into pieces too short for it.
        """
        self._sweep()
        placed = self._placed.pop(id(source), None)
        if placed is not None and self._buffer.pool.hold_span(placed.span):
            self._placed[id(source)] = placed
            return Entered(placed.weights, {})
        taken = self._buffer.take_span(self.pages(source))
        if taken is None:
            return None
        span, moved = taken
        weights = copied_into(self._buffer.of(span), source)
        self._placed[id(source)] = _Placed(weakref.ref(source, self._forgets(id(source))), span, weights)
        return Entered(weights, moved)

    def leave(self, source: LoraWeights) -> None:
        """Gives back one `enter`."""
        self._buffer.pool.give_span(self._placed[id(source)].span)
        self._sweep()

    def _forgets(self, key: int) -> Callable[[object], None]:
        gone = self._gone
        return lambda _: gone.append(key)

    def _sweep(self) -> None:
        """Blank the pages of adapters that nobody can ask for again: their source is no more."""
        while self._gone:
            placed = self._placed.get(key := self._gone.pop())
            if placed is not None and placed.source() is None:
                del self._placed[key]
                self._buffer.pool.drop_span(placed.span)
