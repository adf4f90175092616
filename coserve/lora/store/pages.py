"""GPU copies of adapters: each is one run of consecutive pages of the KV cache's pool (S-LoRA's unified paging).

S-LoRA (§4.2) cuts an adapter into pages of one vector each, and its kernels gather them. Here a page holds the keys and
values of `page_tokens` tokens in all layers (2 MiB at 8B), an adapter of rank 16 has 40 of them, and its matrices lie
in one piece: kernels read them as if there were no pages, and less than one page an adapter is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from coserve.lora.store.entry import Entry, GpuCopy
from coserve.lora.store.mirror import CopyMirror, NoMirror
from coserve.lora.store.packing import copied_into
from coserve.memory.buffer import PageBuffer
from coserve.model.lora import LoraWeights


@dataclass(frozen=True)
class Activated:
    """An adapter in pages, and where KV pages moved to free its own."""

    weights: LoraWeights
    moved: Mapping[int, int]


class AdapterPages:
    """Loads adapters into pages, from their host copies.

    A GPU copy that no sequence uses stays cached until its pages are needed; the pool evicts it by age, among the pages
    of cached prefixes. Pages may be written while a step under way still reads what they held before: see `PageBuffer`.
    """

    def __init__(self, buffer: PageBuffer, evicted: Callable[[Entry], None], mirror: CopyMirror | None = None) -> None:
        """`evicted` is called when an adapter has lost its GPU copy. It must not allocate pages."""
        self._buffer, self._evicted, self._mirror = buffer, evicted, mirror or NoMirror()

    def pages(self, entry: Entry) -> int:
        """Pages that the adapter takes."""
        return max(1, self._buffer.pages_for(entry.size))

    def needs(self, entry: Entry) -> int:
        """Free pages that `activate` takes: none if a sequence uses the adapter already."""
        return 0 if entry.gpu is not None and entry.gpu.span.references else self.pages(entry)

    def activate(self, entry: Entry) -> Activated | None:
        """The adapter in pages until as many calls of `deactivate`; None if there are no pages for it or no copy to
        load now.

        There are pages whenever `needs` pages are free, unless other held adapters cut the pool into pieces too short.
        """
        if entry.gpu is not None:
            held = self._buffer.pool.acquire_span(entry.gpu.span)
            assert held, "the pool tells of evicted spans"
            return Activated(entry.gpu.weights, {})
        if entry.host is None:
            return None
        taken = self._buffer.allocate_span(self.pages(entry), lambda: self._evict(entry))
        if taken is None:
            return None
        span, moved = taken
        entry.gpu = GpuCopy(copied_into(self._buffer.of(span), entry.host), span)
        self._mirror.loaded(entry.ref, span, moved)
        return Activated(entry.gpu.weights, moved)

    def deactivate(self, entry: Entry) -> None:
        """Gives back one `activate`."""
        assert entry.gpu is not None, f"{entry.ref} is not in pages"
        self._buffer.pool.release_span(entry.gpu.span)

    def drop(self, entry: Entry) -> None:
        """Blank the pages of an adapter that no sequence uses; nothing happens if it has none."""
        if entry.gpu is not None:
            self._buffer.pool.drop_span(entry.gpu.span)

    def _evict(self, entry: Entry) -> None:
        entry.gpu = None
        self._evicted(entry)
