"""All adapters of one engine by (id, version), from disk to host memory, and the requests that wait for one.

Files are read on threads, while other requests are served. Everything else happens on the event-loop thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from coserve.adapter_store.entry import Entry, State
from coserve.adapter_store.packing import packed, packed_bytes
from coserve.errors import AdapterBusy, AdapterNotFound
from coserve.model.lora import LoraWeights
from coserve.queues.inference import Queued
from coserve.state.retries import Backoff, Retries
from coserve.types import AdapterDigests, AdapterRef

READERS = 2
"""Adapters that are read at once. More would share the same disk and the same interpreter."""
READ_BACKOFF = Backoff(total=10.0)

Load = Callable[[AdapterRef, AdapterDigests | None], LoraWeights]
"""Reads an adapter's files. Raises `AdapterNotFound` if it has none, `StorageError` if they cannot be read now, and
`AdapterError` if they are not what the digests say or not an adapter of this base."""


@dataclass(frozen=True)
class HostBudget:
    """Host memory for idle adapters. Adapters that requests need stay beyond it."""

    adapters: int
    bytes: int | None = None
    """None: bounded by `adapters` alone."""

    def __post_init__(self) -> None:
        assert self.adapters >= 1, f"expected a budget of at least one adapter, got {self.adapters}"


class AdapterStore:
    """A cache of adapters over their files. One entry an adapter version; idle ones are evicted by last use.

    A request waits here until its adapter is in memory (`ready`, `next_arrived`, `failed`), then acquires it, and releases it
    when it ends.
    """

    def __init__(
        self,
        load: Load,
        budget: HostBudget,
        *,
        pinned: bool = False,
        backoff: Backoff = READ_BACKOFF,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`pinned`: host copies are in pinned memory, from which a GPU copies asynchronously. `backoff`: between the
        attempts of a read that raises `StorageError`, whose pauses are slept by `sleep`."""
        self._load, self._budget, self._pinned = load, budget, pinned
        self._entries: dict[AdapterRef, Entry] = {}  # least recently used first
        self._host_copies = self._host_bytes = 0
        self._waiting: dict[str, Queued] = {}
        self._failed: dict[str, tuple[Queued, Exception]] = {}
        self._threads = ThreadPoolExecutor(READERS, "adapters")
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed: Callable[[], None] = lambda: None
        self._retries = Retries(backoff, sleep=sleep, changed=lambda: self._changed())

    # ---- requests that wait

    def notify(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever a read ends, or is tried again."""
        self._changed = changed

    @property
    def waiting(self) -> int:
        """Requests that wait here."""
        return len(self._waiting) + len(self._failed)

    @property
    def troubles(self) -> tuple[str, ...]:
        """Reads that failed and are being tried again."""
        return self._retries.notes

    def ready(self, request: Queued) -> bool:
        """Whether the request's adapter is in memory. If it is not, its files are read, and the request waits here."""
        ref = request.message.adapter
        if ref is None or self.state(ref) is State.HOST:
            return True
        entry = self._entry(ref)
        entry.digests = request.message.digests or entry.digests
        entry.waiting += 1
        self._waiting[request.message.id] = request
        if not entry.reading:
            entry.reading = True
            task = asyncio.create_task(self._read(entry))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return False

    def next_arrived(self) -> Queued | None:
        """Remove and return the first of the waiting requests whose adapter is in memory now; None if there is none.

        It acquires its adapter before the next one is asked for: until then nothing evicts it.
        """
        found = next((one for one in self._waiting.values() if self._of(one).state is State.HOST), None)
        if found is not None:
            self._stop_waiting(found)
        return found

    def failed(self) -> list[tuple[Queued, Exception]]:
        """Remove and return the requests whose adapters could not be read, and what was raised."""
        found, self._failed = list(self._failed.values()), {}
        return found

    def cancel(self, id: str) -> bool:
        """Forget a waiting request. False if it does not wait here."""
        if (request := self._waiting.get(id)) is not None:
            self._stop_waiting(request)
            self._evict()
            return True
        return self._failed.pop(id, None) is not None

    def close(self) -> None:
        """Stop reading. Nobody waits any more."""
        self._waiting.clear()
        self._failed.clear()
        for task in self._tasks:
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- references

    def state(self, ref: AdapterRef) -> State:
        """Where the adapter is."""
        entry = self._entries.get(ref)
        return State.DISK if entry is None else entry.state

    def resident(self) -> tuple[AdapterRef, ...]:
        """Adapters that are in memory and can be acquired, least recently used first."""
        return tuple(ref for ref, entry in self._entries.items() if entry.state is State.HOST and not entry.deleted)

    def acquire(self, ref: AdapterRef) -> LoraWeights:
        """The adapter, which stays in memory until `release` was called as often as this.

        An adapter that is not in memory is read here, and the caller waits: requests of the engine were `ready` before.
        Raises `AdapterNotFound`, and what `Load` raises.
        """
        entry = self._entries.get(ref)
        if entry is not None and entry.deleted:
            raise AdapterNotFound(f"adapter {ref} was deleted", field="adapter")
        if entry is None or entry.host is None:
            weights = self._read_files(ref, None if entry is None else entry.digests)
            entry = self._entry(ref)
            self._keep(entry, weights)
        assert entry.host is not None, "it was kept"
        entry.references += 1
        self._use(entry)
        return entry.host

    def release(self, ref: AdapterRef) -> None:
        """Gives back one `acquire`."""
        entry = self._entries[ref]
        assert entry.references > 0, f"{ref} was released more often than acquired"
        entry.references -= 1
        self._discard_if_unused(entry)
        self._evict()

    def publish(self, ref: AdapterRef, weights: LoraWeights) -> None:
        """Makes a finished adapter available at once, without reading its files. Raises `AdapterBusy`."""
        entry = self._entries.get(ref)
        if entry is not None and entry.references:
            raise AdapterBusy(f"adapter {ref} is in use")
        self._keep(self._entry(ref), self._packed(weights))

    def drop(self, ref: AdapterRef) -> None:
        """Forgets a deleted adapter: requests that wait for it fail, requests that acquired it keep it."""
        entry = self._entries.get(ref)
        if entry is None:
            return
        entry.deleted = True
        if not entry.reading:
            self._fail_waiting(entry, _deleted(ref))
        self._discard_if_unused(entry)

    # ---- reading

    async def _read(self, entry: Entry) -> None:
        loop = asyncio.get_running_loop()
        try:
            weights = await self._retries.run(
                f"adapter {entry.ref}",
                lambda: loop.run_in_executor(self._threads, self._read_files, entry.ref, entry.digests),
            )
            if entry.deleted:
                raise _deleted(entry.ref)
            if entry.host is None:  # else it was published meanwhile
                self._keep(entry, weights)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the requests for this adapter alone
            self._fail_waiting(entry, error)
        finally:
            entry.reading = False
            self._discard_if_unused(entry)
            self._evict()
            self._changed()

    def _read_files(self, ref: AdapterRef, digests: AdapterDigests | None) -> LoraWeights:
        return self._packed(self._load(ref, digests))

    def _packed(self, weights: LoraWeights) -> LoraWeights:
        return packed(weights, pinned=True) if self._pinned else weights

    # ---- entries

    def _of(self, request: Queued) -> Entry:
        assert request.message.adapter is not None, "a request of the base waits for nothing"
        return self._entries[request.message.adapter]

    def _stop_waiting(self, request: Queued) -> None:
        entry = self._of(request)
        entry.waiting -= 1
        del self._waiting[request.message.id]
        self._discard_if_unused(entry)

    def _fail_waiting(self, entry: Entry, error: Exception) -> None:
        for id, request in [*self._waiting.items()]:
            if request.message.adapter == entry.ref:
                del self._waiting[id]
                self._failed[id] = request, error
        entry.waiting = 0

    def _entry(self, ref: AdapterRef) -> Entry:
        if ref not in self._entries:
            self._entries[ref] = Entry(ref)
        return self._entries[ref]

    def _use(self, entry: Entry) -> None:
        """The entry is the most recently used one."""
        self._entries[entry.ref] = self._entries.pop(entry.ref)

    def _keep(self, entry: Entry, weights: LoraWeights) -> None:
        """Give the entry its host copy, after others have made room for it: nothing evicts a new copy but a newer one."""
        self._use(entry)
        size = packed_bytes(weights)
        self._drop_host_copy(entry)
        self._evict(adapters=1, size=size)
        entry.host, entry.host_bytes, entry.deleted = weights, size, False
        self._host_copies += 1
        self._host_bytes += size

    def _drop_host_copy(self, entry: Entry) -> None:
        if entry.host is not None:
            self._host_copies -= 1
            self._host_bytes -= entry.host_bytes
            entry.host, entry.host_bytes = None, 0

    def _fits(self, adapters: int, size: int) -> bool:
        """Whether the budget holds so many more adapters and bytes."""
        most = self._budget.bytes
        fits = most is None or self._host_bytes + size <= most
        return fits and self._host_copies + adapters <= self._budget.adapters

    def _evict(self, adapters: int = 0, size: int = 0) -> None:
        """Drops host copies of idle adapters, least recently used first, until so many more fit the budget."""
        if self._fits(adapters, size):
            return
        for entry in [*self._entries.values()]:
            if entry.idle and entry.host is not None:
                self._drop_host_copy(entry)
                self._discard_if_unused(entry)
                if self._fits(adapters, size):
                    return

    def _discard_if_unused(self, entry: Entry) -> None:
        """Forget an adapter that nobody needs and that has no copy, or was deleted."""
        if entry.idle and not entry.reading and (entry.host is None or entry.deleted):
            self._drop_host_copy(entry)
            self._entries.pop(entry.ref, None)


def _deleted(ref: AdapterRef) -> AdapterNotFound:
    return AdapterNotFound(f"no adapter {str(ref)!r}", field="adapter")
