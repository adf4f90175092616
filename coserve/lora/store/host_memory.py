"""The host tier's memory: one mapping, cut into pages, that CUDA pins once and not for each adapter.

An adapter's pages need not be contiguous, so fragmentation never prevents a read, and less than one page is wasted.
Pages are freed when no reference to the adapter's copy is left and all copies from them to the GPU have ended.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock, Thread
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from coserve.core.errors import RequestOutOfMemory
from coserve.core.types import AdapterRef, LoraSettings
from coserve.kernels.lora.types import VECTOR, LoraPair
from coserve.lora.store.packing import LaidOutSites, PackedLayout, PackedSites, PartedSites, packed
from coserve.memory.pages import PagePool
from coserve.model.faults import out_of_memory
from coserve.model.lora import LoraWeights

log = logging.getLogger(__name__)

PAGE = 1 << 20
"""Bytes of a page. Smaller ones waste less, larger ones need fewer copies: 84 MB are at most 81."""
SLICE = 256 << 20
"""Bytes that are pinned by one call: CUDA calls of other threads may wait for it. No part crosses a slice's end, as no
copy may read from two registrations."""

NO_ROOM = "adapters in use fill host_adapter_bytes: others are read into memory that is pinned for each, which is slow"
NO_HUGE_PAGES = "the kernel has no huge pages: the host memory of adapters takes longer to be pinned"

NO_RESERVE = 0x4000
"""`MAP_NORESERVE` on Linux, which Python names since 3.13: else a process whose mappings are larger than the machine's
memory, though hardly used, cannot fork."""


class Unread(Protocol):
    """An adapter that is ready to be written into host memory."""

    @property
    def settings(self) -> LoraSettings: ...
    @property
    def layout(self) -> PackedLayout: ...
    def write(self, parts: Sequence[Tensor]) -> None:
        """Write the layout's bytes into parts (uint8). Raises `StorageError`."""


@dataclass(eq=False)
class HostBlock:
    """Memory for one adapter. Its pages are reused once this object is garbage-collected."""

    parts: tuple[Tensor, ...]
    """uint8, together as many bytes as were asked for."""
    after: tuple[torch.cuda.Event, ...] = ()
    """Events recorded after GPU copies of an earlier adapter from this memory: wait for them before writing."""
    read: list[torch.cuda.Event] = field(default_factory=list)
    """Events recorded after GPU copies of this adapter that may still be running."""

    def copied(self) -> None:
        """Note that a copy from this memory has been put on the current stream."""
        self.read[:] = [event for event in self.read if not _ended(event)]
        self.read.append(torch.cuda.current_stream().record_event())


class _Dropped(NamedTuple):
    """The pages of a released `HostBlock`, and events after GPU copies that may still read them."""

    pages: list[int]
    read: list[torch.cuda.Event]


class HostMemory:
    """Host memory of a fixed size for adapters. Callable on any thread.

    On a GPU it is pinned in the background (`pin`), from the lowest pages on, which are used first. Until then, and if
    it cannot be pinned, copies from it are slower, as CUDA copies the bytes once more.
    """

    def __init__(self, size: int, *, for_kernels: bool, most_outside: int | None = None) -> None:
        """`size`: bytes; what is left of the last page is not used. `for_kernels`: see `packed`. `most_outside`: bytes
        of adapters that find no room here; None: unlimited."""
        self._for_kernels, self._pages = for_kernels, size // PAGE
        self._most_outside, self._outside_bytes = most_outside, 0
        self._left = deque[int]()
        """Bytes of released blocks outside, not yet subtracted. Appended by finalizers, as `_dropped`."""
        self._lock, self._pool = Lock(), PagePool(max(1, self._pages))
        if not self._pages:
            self._pool.allocate(1)  # a pool has a page
        self._dropped = deque[_Dropped]()
        """Released blocks, not yet collected. Appended by finalizers, on any thread at any time."""
        self._read = list[_Dropped]()
        """Released blocks that GPU copies may still read."""
        self._reused = list[torch.cuda.Event]()
        """Events of pages that were freed before the GPU copies from them had ended. Every later block waits for those
        that have not: it may get such a page, too."""
        mapped, self._huge = _mapped(max(1, self._pages) * PAGE)
        mapping = memoryview(mapped)
        if for_kernels and not self._huge:
            log.warning("%s", NO_HUGE_PAGES)
        self._memory = torch.frombuffer(mapping, dtype=torch.uint8)
        self._registered = list[int]()
        """Addresses of pinned slices. Adapters' tensors may outlive this object, so the mapping's end unpins."""
        weakref.finalize(mapping, _unpin, self._registered, mapping.obj).atexit = False
        self._pinned, self._refused, self.outside = 0, "", 0
        """`outside`: adapters so far that found no room."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Why reads and copies of adapters are slow; for /health."""
        found = list[str]()
        if self._refused:
            found.append(f"adapters are copied slowly, as their host memory cannot be pinned: {self._refused}")
        if self._for_kernels:
            found += [note for holds, note in ((not self._huge, NO_HUGE_PAGES), (self.outside, NO_ROOM)) if holds]
        return tuple(found)

    @property
    def bytes(self) -> int:
        """Bytes of all pages."""
        return self._pages * PAGE

    @property
    def free_bytes(self) -> int:
        """Bytes for which `in_pages` finds room."""
        with self._lock:
            self._collect()
            return PAGE * (self._pool.free_pages + sum(len(each.pages) for each in self._read))

    def in_pages(self, size: int) -> HostBlock | None:
        """Return pages for `size` bytes; None: too few are free."""
        wanted = -(-size // PAGE)
        with self._lock:
            self._collect()
            while self._read and self._pool.free_pages < wanted:
                dropped = self._read.pop(0)
                self._pool.free(dropped.pages)
                self._reused += dropped.read
            self._reused = [event for event in self._reused if not _ended(event)]
            pages, after = self._pool.allocate(wanted), tuple(self._reused)
        if pages is None:
            return None
        found = HostBlock(tuple(self._parts(pages, size)), after)
        weakref.finalize(found, self._dropped.append, _Dropped(pages, found.read)).atexit = False
        return found

    def allocate(self, size: int) -> HostBlock:
        """Return memory of `size` bytes: pages, else memory outside, allocated for this adapter alone. Pinning that may
        take a second, so do not call it on an event loop.

        Raises `MemoryError`, `RuntimeError`: there is no memory outside, or more than `most_outside` would be used.
        """
        if (found := self.in_pages(size)) is not None:
            return found
        with self._lock:
            self._take_outside(size)
        pinned = self._for_kernels and torch.cuda.is_available()
        try:
            found = HostBlock((torch.empty(size, dtype=torch.uint8, pin_memory=pinned),))
        except Exception:
            self._left.append(size)
            raise
        weakref.finalize(found, self._left.append, size).atexit = False
        return found

    def _take_outside(self, size: int) -> None:
        """Count an adapter that finds no pages. Raises `MemoryError`."""
        while self._left:
            self._outside_bytes -= self._left.popleft()
        missing = 0 if self._most_outside is None else self._outside_bytes + size - self._most_outside
        if missing > 0:
            raise MemoryError(
                f"adapters in use fill host_adapter_bytes ({self.bytes}) and {self._outside_bytes} bytes beside it; "
                f"{missing} of the {size} bytes of this one are missing"
            )
        if self._for_kernels and not self.outside:
            log.warning("%s", NO_ROOM)
        self._outside_bytes, self.outside = self._outside_bytes + size, self.outside + 1

    def copy(self, source: Unread | LoraWeights, block: HostBlock | None = None) -> LoraWeights:
        """Write an adapter into memory of its size; None: that of `block`. Raises as `Unread.write` and `allocate`."""
        if isinstance(source, LoraWeights):
            source = self.unread(source)
        block = block or self.allocate(source.layout.bytes)
        for event in block.after:
            event.synchronize()
        source.write(block.parts)
        return LoraWeights(source.settings, PartedSites(block.parts, source.layout, block.copied))

    def unread(self, weights: LoraWeights) -> Unread:
        """Return an adapter that `copy` writes here. Its pairs are read one by one, twice."""
        if isinstance(weights.sites, LaidOutSites):
            return _InMemory(self.packed(weights))
        return _SiteBySite(weights, for_kernels=self._for_kernels)

    def packed(self, weights: LoraWeights) -> LoraWeights:
        """Return the adapter in the layout of this memory's copies."""
        return packed(weights, for_kernels=self._for_kernels)

    def pin(self, start_thread: Callable[[], None]) -> Thread:
        """Pin the memory on a thread, which first calls `start_thread`. If CUDA refuses it, `notes` says so."""
        thread = Thread(target=self._pin, args=(start_thread,), name="pin-host-memory", daemon=True)
        thread.start()
        return thread

    def _pin(self, start_thread: Callable[[], None]) -> None:
        start_thread()
        for first in range(0, self.bytes, SLICE):
            own = self._memory[first : min(first + SLICE, self.bytes)]
            try:
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(own.data_ptr(), len(own), 0))  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                self._refused = f"{self._pinned >> 20} of {self.bytes >> 20} MiB are, then: {error}"
                log.warning("the host memory of adapters cannot be pinned: %s", self._refused)
                return
            self._registered.append(own.data_ptr())
            self._pinned += len(own)

    def _collect(self) -> None:
        """Free the pages of released blocks that no GPU copy reads any more."""
        while self._dropped:
            self._read.append(self._dropped.popleft())
        for each in [each for each in self._read if all(map(_ended, each.read))]:
            self._read.remove(each)
            self._pool.free(each.pages)

    def _parts(self, pages: Sequence[int], size: int) -> list[Tensor]:
        """Runs of consecutive pages as tensors, in order; the last one is cut to `size` bytes in all."""
        parts, first, per = list[Tensor](), 0, SLICE // PAGE
        for i in range(1, len(pages) + 1):
            if i == len(pages) or pages[i] != pages[i - 1] + 1 or pages[i] % per == 0:
                at, n = pages[first] * PAGE, min((i - first) * PAGE, size - first * PAGE)
                parts.append(self._memory[at : at + n])
                first = i
        return parts


class _InMemory:
    """A packed adapter in ordinary memory, to be written into a host tier's."""

    def __init__(self, weights: LoraWeights) -> None:
        assert isinstance(weights.sites, PackedSites | PartedSites), "expected a packed adapter"
        self.settings, self._sites, self.layout = weights.settings, weights.sites, weights.sites.layout

    def write(self, parts: Sequence[Tensor]) -> None:
        """See `Unread`."""
        _spread(self._sites.parts if isinstance(self._sites, PartedSites) else (self._sites.memory_N,), parts)


class _SiteBySite:
    """An adapter whose pairs are packed as they are written: there is never a second copy of it."""

    def __init__(self, weights: LoraWeights, *, for_kernels: bool) -> None:
        self.settings, self._sites, self._for_kernels = weights.settings, weights.sites, for_kernels
        like = {name: self._pair(name).to("meta") for name in weights.sites}
        self.layout = PackedLayout(like, VECTOR if for_kernels else 1)

    def _pair(self, name: str) -> LoraPair:
        """Dense for the kernels: see `packed`."""
        return self._sites[name].dense() if self._for_kernels else self._sites[name]

    def write(self, parts: Sequence[Tensor]) -> None:
        """See `Unread`."""
        _spread(map(self._packed, self.layout.places), parts)

    def _packed(self, name: str) -> Tensor:
        place = self.layout.places[name]
        own = torch.empty(place.end - place.first, dtype=torch.uint8)
        self.layout.copy(name, self._pair(name), own, place.first)
        return own


def _spread(sources: Iterable[Tensor], parts: Sequence[Tensor]) -> None:
    """Copy bytes that lie in several tensors into several others, in order, of the same size in all."""
    left = deque(parts)
    for own in sources:
        while len(own):
            if not len(left[0]):
                left.popleft()
                continue
            size = min(len(own), len(left[0]))
            left[0][:size] = own[:size]
            own, left[0] = own[size:], left[0][size:]


def _ended(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def _unpin(addresses: Sequence[int], mapping: object) -> None:
    """Unpin slices while `mapping` is still mapped: later allocations at their addresses would fail."""
    for each in addresses:
        torch.cuda.cudart().cudaHostUnregister(each)  # type: ignore[no-untyped-call]


def _mapped(size: int) -> tuple[mmap.mmap, bool]:
    """Return memory that is allocated as it is used, and whether the kernel has huge pages for it."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return memory, False
    return memory, True


@contextmanager
def memory_errors(ref: AdapterRef) -> Iterator[None]:
    """Raise errors for lack of memory as `RequestOutOfMemory`."""
    try:
        yield
    except Exception as error:  # any kind: lack of memory has several
        if out_of_memory(error):
            raise RequestOutOfMemory(f"no host memory for adapter {ref}: {error}") from error
        raise
