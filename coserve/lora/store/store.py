"""The store of all adapters of one engine by (id, version), on disk, in host memory and on the GPU.

Files are read on threads, while other requests are served. Everything else runs on the event-loop thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from coserve.core.cancellation import keep_task
from coserve.core.errors import AdapterBusy, AdapterNotFound
from coserve.core.health import LoraServerInfo
from coserve.core.types import AdapterDigests, AdapterRef
from coserve.lora.store.entry import Entry, State
from coserve.lora.store.host import HostCopies
from coserve.lora.store.host_memory import HostBlock, HostMemory, Unread, memory_errors
from coserve.lora.store.interfaces import CopyMirror, RemotePairs
from coserve.lora.store.packing import packed_bytes
from coserve.lora.store.pages import Activated, AdapterPages
from coserve.lora.store.reads import LoadTimes, ReadTurns
from coserve.memory.buffer import PageBuffer
from coserve.model.lora import LoraWeights
from coserve.state.retries import Backoff, Retries

READERS = 2
"""Adapters that are read at the same time. More would only compete for the disk and the GIL."""
READ_AHEAD = 16
"""Most adapters that wait to be read before a request's arrival starts no further read."""
READ_BACKOFF = Backoff(total=10.0)

Load = Callable[[AdapterRef, AdapterDigests | None], Unread | LoraWeights]
"""Reads an adapter's files, or opens one that `HostMemory.copy` reads.

Raises `AdapterNotFound` if there are none, `StorageError` if they cannot be read now, and another `AdapterError` if
they do not match the digests or are no adapter of this base.
"""


class AdapterStore:
    """A cache of adapters over their files, with one entry per adapter version. Idle host copies leave by frequency and
    size (`host.py`), idle GPU copies in LRU order.

    A request waits until its adapter is in memory (`ready`, `reading`, `waited`), acquires it, and releases it when the
    request ends. In between it may be scheduled and preempted (`activate`, `deactivate`). Copies on the host and on the
    GPU are evicted independently. If a request comes for an adapter with only a GPU copy, the host copy is read again
    while the request runs: so if it is preempted and the GPU copy evicted, resuming does not need the disk.
    """

    def __init__(
        self,
        load: Load,
        budget: int,
        *,
        memory: HostMemory | None = None,
        backoff: Backoff = READ_BACKOFF,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        mirror: CopyMirror | None = None,
        placed: Callable[[LoraWeights], None] = lambda _: None,
        times: LoadTimes | None = None,
        notes: Callable[[], tuple[str, ...]] = lambda: (),
        remote: RemotePairs | None = None,
    ) -> None:
        """`budget`: bytes of host copies (`HostCopies`). `memory`: holds them; None: they stay as `load` returns them.
        `backoff`: pauses between attempts of a read that raises `StorageError`; `sleep` waits for them. `mirror`:
        repeats all copies elsewhere. `placed`: see `AdapterPages`. `times`: counts where the time goes; `notes`: those
        of `load`. `remote`: the LoRA servers, if there are any."""
        self._load, self._memory = load, memory
        self._mirror, self._placed, self._remote = mirror or CopyMirror(), placed, remote
        self._entries: dict[AdapterRef, Entry] = {}  # least recently used first
        self._host = HostCopies(budget)
        self._pages: AdapterPages | None = None
        self.times, self._notes = times or LoadTimes(), notes
        self._threads, self._turns = ThreadPoolExecutor(READERS, "adapters"), ReadTurns(READERS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed: Callable[[], None] = lambda: None
        self._kept: Callable[[LoraWeights], None] = lambda weights: None
        self._retries = Retries(backoff, sleep=sleep, changed=lambda: self._changed())

    # ---- requests that wait

    def notify(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever a read ends or is retried."""
        self._changed = changed

    @property
    def troubles(self) -> tuple[str, ...]:
        """Descriptions of failed reads that are being retried, and of what makes reads slow."""
        return self._retries.notes + self._notes() + (() if self._remote is None else self._remote.troubles)

    @property
    def server_losses(self) -> int:
        """How often LoRA servers were lost so far."""
        return 0 if self._remote is None else self._remote.losses

    @property
    def lora_servers(self) -> tuple[LoraServerInfo, ...]:
        """The state of each LoRA server."""
        return () if self._remote is None else self._remote.states()

    def ready(self, ref: AdapterRef, digests: AdapterDigests | None = None) -> bool:
        """Whether the adapter is in memory. If it is not, start to read its files.

        After False: as soon as it is not `reading` any more, it can be acquired or has a `failure`. Nothing evicts it
        until `waited` is called.
        """
        entry = self._entry(ref)
        if entry.host is None and not entry.reading:
            entry.digests = digests or entry.digests
            self._start_reading(entry)
        if entry.in_memory:
            return True
        entry.waiting += 1
        return False

    def waited(self, ref: AdapterRef) -> None:
        """Call it once for each `ready` that returned False, when that request has acquired the adapter or has
        ended."""
        entry = self._entries[ref]
        entry.waiting -= 1
        self._discard_if_unused(entry)
        self._evict()

    def prefetch(self, ref: AdapterRef, digests: AdapterDigests | None = None) -> None:
        """Start to read an adapter that no request needs yet. Its copy is idle."""
        if not self.ready(ref, digests):
            self.waited(ref)

    def arrived(self, ref: AdapterRef, digests: AdapterDigests | None = None) -> None:
        """Start to read the adapter of a request that has joined the queue, unless many reads wait already: what is
        read long before its turn would be evicted again."""
        if len(self._turns) < READ_AHEAD:
            self.prefetch(ref, digests)

    def pin(self, ref: AdapterRef, digests: AdapterDigests | None = None, *, pinned: bool) -> None:
        """Read the adapter, and keep its host copy until it is unpinned or deleted."""
        self._entry(ref).pinned = pinned
        if pinned:
            self.prefetch(ref, digests)
        else:
            self._discard_if_unused(self._entries[ref])
            self._evict()

    def pinned(self, ref: AdapterRef) -> bool:
        """Whether the adapter is pinned."""
        entry = self._entries.get(ref)
        return entry is not None and entry.pinned

    def close(self) -> None:
        """Stop reading, and end the LoRA servers."""
        for task in self._tasks:
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._remote is not None:
            self._remote.close()

    # ---- references

    def state(self, ref: AdapterRef) -> State:
        """Return the fastest tier that holds the adapter."""
        entry = self._entries.get(ref)
        return State.DISK if entry is None else entry.state

    def resident(self) -> tuple[AdapterRef, ...]:
        """Adapters with files that are in memory and can be acquired, in LRU order."""
        return tuple(
            ref for ref, entry in self._entries.items() if entry.in_memory and not (entry.deleted or entry.temporary)
        )

    def acquire(self, ref: AdapterRef) -> LoraWeights:
        """Return the adapter's GPU copy, else its host copy. It stays in memory until as many calls of `release`.

        An adapter without a copy is read here, and the caller blocks, unless a read is under way; the engine's requests
        wait for `ready` first. Raises `AdapterNotFound`, and the errors of `Load`.
        """
        entry = self._entries.get(ref)
        if entry is not None and entry.deleted:
            raise AdapterNotFound(f"adapter {ref} was deleted", field="adapter")
        if entry is None or (entry.host is None and not entry.reading):
            try:
                found = self._read_files(ref, None if entry is None else entry.digests)
                weights = self._copy(ref, found, self._pages_for(found))
            except Exception:
                self._mirror.dropped(ref)
                raise
            entry = self._entry(ref)
            self._keep(entry, weights)
        copy = entry.host if entry.gpu is None else entry.gpu.weights
        assert copy is not None, f"expected {ref} in memory, it is {entry.state}"
        entry.references += 1
        self._use(entry)
        self._host.used(entry)
        return copy

    def release(self, ref: AdapterRef) -> None:
        """Undo one `acquire`."""
        entry = self._entries[ref]
        assert entry.references > 0, f"{ref} was released more often than acquired"
        entry.references -= 1
        if not entry.references:
            entry.lacks_pages_since = None
        self._discard_if_unused(entry)
        self._evict()

    def host_copy(self, weights: LoraWeights) -> LoraWeights:
        """Copy an adapter to the host tier's memory, in its layout, a pair at a time. Callable on any thread."""
        if self._memory is None:
            return LoraWeights(weights.settings, dict(weights.sites), weights.remote)
        return self._memory.copy(weights)

    def publish(self, ref: AdapterRef, weights: LoraWeights, *, temporary: bool = False) -> None:
        """Make an adapter available at once, without reading its files.

        `weights`: from `host_copy`. `temporary`: it has no files, and stays until it is dropped. Raises `AdapterBusy`.
        """
        entry = self._entries.get(ref)
        if entry is not None and entry.references:
            raise AdapterBusy(f"adapter {ref} is in use")
        if entry is not None and self._pages is not None:
            self._pages.drop(entry)
        entry = self._entry(ref)
        entry.deleted, entry.temporary = False, temporary
        self._keep(entry, weights)

    def drop(self, ref: AdapterRef) -> None:
        """Forget a deleted or temporary adapter. Requests that wait for it fail; requests that acquired it keep it."""
        entry = self._entries.get(ref)
        if entry is None:
            self._mirror.dropped(ref)
            return
        entry.deleted, entry.temporary, entry.pinned = True, False, False
        entry.failure = AdapterNotFound(f"no adapter {str(ref)!r}", field="adapter")
        self._discard_if_unused(entry)

    # ---- pages of the GPU

    def use_pool(
        self,
        buffer: PageBuffer,
        evicted: Callable[[AdapterRef], None],
        kept: Callable[[LoraWeights], None] = lambda weights: None,
    ) -> None:
        """Load adapters into pages of this pool from now on.

        `evicted` is called at once when an adapter loses its GPU copy, so that its addresses can be forgotten; `kept`
        when an adapter gets a host copy.
        """
        assert self._pages is None, "a store loads into one pool"
        self._kept = kept

        def lost(entry: Entry) -> None:
            evicted(entry.ref)
            self._discard_if_unused(entry)

        self._pages = AdapterPages(buffer, lost, self._mirror, self._placed, self.times, self._remote)

    @property
    def host_bytes(self) -> int:
        """Bytes of all host copies."""
        return self._host.bytes

    def size(self, ref: AdapterRef) -> int:
        """Bytes of an adapter in memory; 0 if it is not."""
        entry = self._entries.get(ref)
        return 0 if entry is None else entry.size

    def pages(self, ref: AdapterRef) -> int:
        """Number of pages that an acquired adapter takes."""
        return self._in_pages.pages(self._entries[ref])

    def least_pages(self, ref: AdapterRef) -> int:
        """Number of pages that it takes where LoRA servers hold its experts' pairs."""
        return self._in_pages.least(self._entries[ref])

    def failure(self, ref: AdapterRef) -> Exception | None:
        """The reason why an adapter that a request acquired or waits for is not in memory and will not be.

        Reading its files raised this error, or it was deleted. None if there is no such reason.
        """
        entry = self._entries[ref]
        return entry.failure if entry.state is State.DISK else None

    def reading(self, ref: AdapterRef) -> bool:
        """Whether an adapter has no copy yet, but is being read; `notify`'s function is called when the read ends."""
        return self._entries[ref].state is State.READING

    def needs(self, ref: AdapterRef) -> int:
        """Number of free pages that `activate` needs."""
        return self._in_pages.needs(self._entries[ref])

    def to_copy(self, ref: AdapterRef) -> int:
        """Bytes that `activate` copies; 0 if the adapter is in pages."""
        entry = self._entries[ref]
        return 0 if entry.gpu is not None else self._in_pages.bytes(entry)

    def lacks_pages(self, ref: AdapterRef) -> None:
        """Note that a request waits for pages before its adapter can be activated."""
        entry = self._entries[ref]
        if entry.lacks_pages_since is None:
            entry.lacks_pages_since = time.perf_counter()

    def activate(self, ref: AdapterRef) -> Activated | None:
        """Load an acquired adapter into pages, where it stays until as many calls of `deactivate`.

        Returns None if there is no room for it now, or its host copy is being read. Not for adapters with a `failure`.
        """
        entry = self._entries[ref]
        assert entry.state is not State.DISK, f"{ref} has no copy"
        if (since := entry.lacks_pages_since) is not None:
            self.times.add("pages", time.perf_counter() - since)
            entry.lacks_pages_since = None
        return self._in_pages.activate(entry)

    def host_weights(self, ref: AdapterRef) -> LoraWeights:
        """Return the host copy of an acquired adapter that is never activated: a KV prefix alone."""
        copy = self._entries[ref].host
        assert copy is not None, f"{ref} has no host copy"
        return copy

    def in_pages(self, ref: AdapterRef) -> LoraWeights:
        """Return the GPU copy of an activated adapter."""
        copy = self._entries[ref].gpu
        assert copy is not None, f"{ref} is not in pages"
        return copy.weights

    def deactivate(self, ref: AdapterRef) -> None:
        """Undo one `activate`."""
        self._in_pages.deactivate(self._entries[ref])

    @property
    def _in_pages(self) -> AdapterPages:
        assert self._pages is not None, "expected a pool of pages"
        return self._pages

    # ---- reading

    def _start_reading(self, entry: Entry) -> None:
        entry.reading, entry.failure = True, None
        keep_task(self._read(entry), self._tasks)

    async def _read(self, entry: Entry) -> None:
        try:
            weights = await self._retries.run(f"adapter {entry.ref}", lambda: self._read_in_turn(entry))
            published_meanwhile = entry.host is not None
            if not published_meanwhile and not (entry.deleted and entry.idle):
                self._keep(entry, weights)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the requests for this adapter alone
            entry.failure = error
            if entry.host is None:  # the mirror may have read it
                self._mirror.dropped(entry.ref)
        finally:
            entry.reading = False
            self._discard_if_unused(entry)
            self._evict()
            self._changed()

    async def _read_in_turn(self, entry: Entry) -> LoraWeights:
        with self.times.during("queue"):
            await self._turns.take(entry)
        try:
            loop, ref = asyncio.get_running_loop(), entry.ref
            found = await loop.run_in_executor(self._threads, self._read_files, ref, entry.digests)
            if self._memory is None:
                return self._copy(ref, found, None)
            return await loop.run_in_executor(self._threads, self._copy, ref, found, self._pages_for(found))
        finally:
            self._turns.give_back()

    def _read_files(self, ref: AdapterRef, digests: AdapterDigests | None) -> Unread | LoraWeights:
        with memory_errors(ref):
            found = self._load(ref, digests)
            return self._memory.packed(found) if self._memory is not None and isinstance(found, LoraWeights) else found

    def _pages_for(self, found: Unread | LoraWeights) -> HostBlock | None:
        """Return pages of the store's memory for a copy, evicting idle adapters if there are none otherwise. None:
        those in use fill it, or the store has no memory."""
        if self._memory is None:
            return None
        size = packed_bytes(found) if isinstance(found, LoraWeights) else found.layout.bytes
        while self._memory.bytes >= size > self._memory.free_bytes and self._evict_one():
            pass
        return self._memory.in_pages(size)

    def _copy(self, ref: AdapterRef, found: Unread | LoraWeights, block: HostBlock | None) -> LoraWeights:
        """Copy an adapter into `block`, else into memory that is allocated for it. Raises `RequestOutOfMemory`."""
        if self._memory is None:
            assert isinstance(found, LoraWeights), "a store without memory reads files itself"
            return found
        with memory_errors(ref):
            return self._memory.copy(found, block)

    # ---- entries

    def _entry(self, ref: AdapterRef) -> Entry:
        if ref not in self._entries:
            self._entries[ref] = Entry(ref)
        return self._entries[ref]

    def _use(self, entry: Entry) -> None:
        """Mark the entry as the most recently used one."""
        self._entries[entry.ref] = self._entries.pop(entry.ref)

    def _keep(self, entry: Entry, weights: LoraWeights) -> None:
        """Give the entry its host copy. Others are evicted first, so that a new copy is evicted only for a newer
        one."""
        self._use(entry)
        self._host.remove(entry)
        self._evict(packed_bytes(weights))
        self._host.add(entry, weights)
        self._kept(weights)

    def _evict(self, size: int = 0) -> None:
        """Drop host copies of idle adapters until `size` more bytes fit the budget, and one more adapter the memory:
        `host_copy` cannot evict any."""
        while (self._host.over(size) or self._memory_is_full()) and self._evict_one():
            pass

    def _memory_is_full(self) -> bool:
        memory = self._memory
        return memory is not None and memory.free_bytes < min(self._host.largest, memory.bytes // 4)

    def _evict_one(self) -> bool:
        """Drop the host copy of the least valuable idle adapter; False: there is none."""
        ref = self._host.next_to_leave(lambda ref: self._entries[ref].idle)
        if ref is None:
            return False
        entry = self._entries[ref]
        self._host.remove(entry)
        self._mirror.dropped(ref)
        self._discard_if_unused(entry)
        return True

    def _discard_if_unused(self, entry: Entry) -> None:
        """Forget an adapter that no request needs and that has no copy, or was deleted."""
        if entry.idle and not entry.reading and (entry.deleted or not entry.in_memory):
            self._host.remove(entry)
            self._mirror.dropped(entry.ref)
            self._entries.pop(entry.ref, None)
            if self._pages is not None:
                self._pages.drop(entry)
