"""GPU copies of adapters: each is one run of consecutive pages of the KV cache's pool (S-LoRA's unified paging).

S-LoRA (§4.2) cuts an adapter into pages of one vector each, and its kernels gather them. Here a page holds the keys and
values of `page_tokens` tokens in all layers (2 MiB at 8B). An adapter of rank 16 takes 40 pages, and its matrices are
contiguous: kernels read them as if there were no pages, and less than one page per adapter is wasted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from coserve.lora.store.entry import Entry, GpuCopy
from coserve.lora.store.interfaces import CopyMirror, RemotePairs
from coserve.lora.store.packing import copied_into, without_experts
from coserve.lora.store.reads import LoadTimes
from coserve.memory.buffer import PageBuffer
from coserve.memory.pages import Span
from coserve.model.lora import LoraWeights


@dataclass(frozen=True)
class Activated:
    """An adapter in pages, and the KV pages that moved to make room for it."""

    weights: LoraWeights
    moved: Mapping[int, int]


class AdapterPages:
    """Loads adapters from their host copies into pages.

    A GPU copy that no sequence uses stays cached until its pages are needed. The pool evicts it in LRU order with the
    pages of cached prefixes. Pages may be written while an earlier step still reads their old content: see
    `PageBuffer`.
    """

    def __init__(
        self,
        buffer: PageBuffer,
        evicted: Callable[[Entry], None],
        mirror: CopyMirror | None = None,
        placed: Callable[[LoraWeights], None] = lambda _: None,
        times: LoadTimes | None = None,
        remote: RemotePairs | None = None,
    ) -> None:
        """`evicted` is called when an adapter has lost its GPU copy. It must not allocate pages. `placed` is called
        with each new GPU copy, after the mirror's. `remote`: the LoRA servers, if there are any."""
        self._buffer, self._evicted, self._mirror, self._placed = buffer, evicted, mirror or CopyMirror(), placed
        self._times, self._copies, self._remote = times or LoadTimes(), PageCopies(buffer), remote

    def pages(self, entry: Entry) -> int:
        """Number of pages that the adapter takes now; fewer while LoRA servers hold its experts' pairs."""
        return max(1, self._buffer.pages_for(self.bytes(entry)))

    def least(self, entry: Entry) -> int:
        """Number of pages that it takes if LoRA servers hold its experts' pairs."""
        return self.pages(entry) if self._remote is None else max(1, self._buffer.pages_for(entry.without_experts))

    def bytes(self, entry: Entry) -> int:
        """Bytes of the copy that `activate` would make."""
        return entry.size if self._slot(entry) < 0 else entry.without_experts

    def _slot(self, entry: Entry) -> int:
        return -1 if self._remote is None else self._remote.slot(entry.ref)

    def needs(self, entry: Entry) -> int:
        """Number of free pages that `activate` needs; 0 if a sequence uses the adapter already."""
        return 0 if entry.gpu is not None and entry.gpu.span.references else self.pages(entry)

    def activate(self, entry: Entry) -> Activated | None:
        """Load the adapter into pages, where it stays until as many calls of `deactivate`.

        Returns None if there is no room for it, or no host copy to load now. There is room whenever `needs` pages are
        free, unless other adapters in use leave only shorter runs of pages.
        """
        slot = self._slot(entry)  # once: it may change at any time
        if entry.gpu is not None and entry.gpu.weights.remote not in (-1, slot) and not entry.gpu.span.references:
            self.drop(entry)  # the servers that held its other pairs were lost, or have dropped them
        if entry.gpu is not None:
            held = self._buffer.pool.acquire_span(entry.gpu.span)
            assert held, "the pool tells of evicted spans"
            return Activated(entry.gpu.weights, {})
        if entry.host is None:
            return None
        with self._times.during("defragment"):
            pages = max(1, self._buffer.pages_for(entry.size if slot < 0 else entry.without_experts))
            taken = self._buffer.allocate_span(pages, lambda: self._evict(entry))
        if taken is None:
            return None
        span, moved = taken
        with self._times.during("copy"):
            own = entry.host if slot < 0 else without_experts(entry.host, slot)
            entry.gpu = GpuCopy(self._copies.copy(own, span), span)
        self._mirror.loaded(entry.ref, span, moved)
        self._placed(entry.gpu.weights)
        return Activated(entry.gpu.weights, moved)

    def deactivate(self, entry: Entry) -> None:
        """Undo one `activate`."""
        assert entry.gpu is not None, f"{entry.ref} is not in pages"
        self._buffer.pool.release_span(entry.gpu.span)

    def drop(self, entry: Entry) -> None:
        """Evict the GPU copy of an adapter that no sequence uses, if it has one."""
        if entry.gpu is not None:
            self._buffer.pool.drop_span(entry.gpu.span)

    def _evict(self, entry: Entry) -> None:
        entry.gpu = None
        self._evicted(entry)


class PageCopies:
    """Copies of adapters into pages. On a GPU they run on a stream of their own: those into pages that the step in
    flight does not use overlap it, others begin when it has ended. The next step waits for them on the device.

    Steps wait for whole adapters, not layer by layer: compiled steps are CUDA graphs, which begin as a whole.
    """

    def __init__(self, buffer: PageBuffer) -> None:
        self._buffer, self._device = buffer, buffer.device
        on_gpu = self._device.type == "cuda"
        self.stream = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
        """The copies run on it; None on a CPU."""

    def copy(self, weights: LoraWeights, span: Span) -> LoraWeights:
        """Copy an adapter into a span that was just allocated; return its views there."""
        if self.stream is None:
            return copied_into(self._buffer.of(span), weights)
        steps = torch.cuda.current_stream(self._device)
        if not self._buffer.is_quiet(span):
            self.stream.wait_stream(steps)
        with torch.cuda.stream(self.stream):
            copy = copied_into(self._buffer.of(span), weights)
        steps.wait_stream(self.stream)
        return copy
