"""Which adapters are in host memory: those in use, and the most recently used idle ones.

The middle of three tiers: files (the truth), host memory, pages of the pool (`adapter_store.pages`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coserve.adapter_store.pages import packed
from coserve.errors import AdapterBusy, AdapterNotFound
from coserve.model.lora import LoraWeights
from coserve.types import AdapterDigests, AdapterRef


@dataclass
class _Resident:
    weights: LoraWeights
    holders: int = 0
    dropped: bool = False


class Residency:
    """A cache of adapters over their files. Not for two threads at once, but for `read`.

    At most `capacity` adapters stay, except that whatever somebody holds stays always, and what was just published
    stays until something else comes.
    """

    def __init__(self, load: Callable[[AdapterRef], LoraWeights], capacity: int, *, pinned: bool = False) -> None:
        """`load` reads an adapter's files; raises `AdapterNotFound` for one that has none. `pinned`: adapters are kept
        as copies in pinned memory, from which a GPU takes them without anybody waiting."""
        assert capacity >= 1, f"expected a capacity of at least 1, got {capacity}"
        self._load, self._pinned = load, pinned
        self._capacity = capacity
        self._residents: dict[AdapterRef, _Resident] = {}  # least recently used first
        self._digests: dict[AdapterRef, AdapterDigests] = {}

    def acquire(self, ref: AdapterRef) -> LoraWeights:
        """The adapter, in memory until `release` was called as often as this.

        One version is one object as long as it is in memory, which is how the pool knows it. Raises `AdapterNotFound`,
        and what `load` raises.
        """
        resident = self._residents.pop(ref, None)
        if resident is None:
            self._evict(room=1)
            resident = _Resident(self._kept(self._load(ref)))
        self._residents[ref] = resident
        if resident.dropped:
            raise AdapterNotFound(f"adapter {ref} was deleted")
        resident.holders += 1
        return resident.weights

    def expect(self, ref: AdapterRef, digests: AdapterDigests) -> None:
        """Remember what the adapter's files must be, for `load` to check."""
        self._digests[ref] = digests

    def expected(self, ref: AdapterRef) -> AdapterDigests | None:
        """What `expect` was told of the adapter."""
        return self._digests.get(ref)

    def missing(self, ref: AdapterRef) -> bool:
        """Whether `acquire` would read files."""
        return ref not in self._residents

    def read(self, ref: AdapterRef) -> Callable[[], None]:
        """Reads the adapter's files, on any thread, beside everything else. Raises what `load` raises.

        Call the returned function on the event-loop thread to commit the load.
        """
        weights = self._kept(self._load(ref))

        def keep() -> None:
            if ref not in self._residents:
                self._evict(room=1)
                self._residents[ref] = _Resident(weights)

        return keep

    def release(self, ref: AdapterRef) -> None:
        """Gives back one `acquire`."""
        resident = self._residents[ref]
        assert resident.holders > 0, f"{ref} was released more often than acquired"
        resident.holders -= 1
        if resident.dropped and resident.holders == 0:
            del self._residents[ref]
        self._evict(room=0)

    def publish(self, ref: AdapterRef, weights: LoraWeights) -> None:
        """Makes a finished adapter available at once, without its files being read. Raises `AdapterBusy`."""
        before = self._residents.pop(ref, None)
        if before is not None and before.holders > 0:
            self._residents[ref] = before
            raise AdapterBusy(f"adapter {ref} is in use")
        self._evict(room=1)
        self._residents[ref] = _Resident(self._kept(weights))

    def drop(self, ref: AdapterRef) -> None:
        """Forgets a deleted adapter: nobody acquires it any more, whoever holds it keeps it until released."""
        self._digests.pop(ref, None)
        resident = self._residents.get(ref)
        if resident is None:
            return
        if resident.holders > 0:
            resident.dropped = True
        else:
            del self._residents[ref]

    def resident(self) -> tuple[AdapterRef, ...]:
        """What is in memory and may be acquired, least recently used first."""
        return tuple(ref for ref, resident in self._residents.items() if not resident.dropped)

    def _kept(self, weights: LoraWeights) -> LoraWeights:
        return packed(weights, pinned=True) if self._pinned else weights

    def _evict(self, room: int) -> None:
        """Drops idle adapters, least recently used first, until `room` more fit."""
        excess = len(self._residents) + room - self._capacity
        idle = [ref for ref, resident in self._residents.items() if resident.holders == 0]
        for ref in idle[: max(excess, 0)]:
            del self._residents[ref]
