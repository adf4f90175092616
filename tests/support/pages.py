"""Pages, and adapters in them, without tensors, and a scheduler's steps without a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coserve.core.types import AdapterDigests, AdapterRef, LoraSettings
from coserve.generate.plan import Scheduled
from coserve.generate.schedule import Scheduler
from coserve.lora.store.pages import Activated
from coserve.memory.pages import PagePool
from coserve.model.lora import LoraWeights

FULL = 1 << 30
"""More pages than there are."""


class BarePages:
    """A pool with no tensors."""

    state_pages = 0

    def __init__(self, pages: int, page_tokens: int) -> None:
        self.pool, self.page_tokens, self.tokens = PagePool(pages), page_tokens, pages * page_tokens

    @property
    def free_pages(self) -> int:
        return self.pool.free_pages

    def allocate(self, n: int) -> list[int] | None:
        return self.pool.allocate(n)

    def free(self, pages: Sequence[int]) -> None:
        self.pool.free(pages)

    def label(self, page: int, key: bytes) -> None:
        self.pool.label(page, key)

    def unlabel(self, page: int) -> None:
        self.pool.unlabel(page)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        return self.pool.find(keys)

    def hold(self, pages: Iterable[int]) -> None:
        self.pool.hold(pages)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)


class BareAdapters:
    """Each of 100 bytes and no pages. Those in `unread` are being read, those in `broken` cannot be."""

    def __init__(self) -> None:
        self.loaded, self.unread, self.broken = set[AdapterRef](), set[AdapterRef](), set[AdapterRef]()
        self.awaited = list[AdapterRef]()

    def arrived(self, ref: AdapterRef, digests: AdapterDigests | None) -> None:
        """Nothing is read ahead."""

    def ready(self, ref: AdapterRef, digests: AdapterDigests | None) -> bool:
        if ref in self.unread or ref in self.broken:
            self.awaited.append(ref)
        return ref not in self.awaited

    def waited(self, ref: AdapterRef) -> None:
        self.awaited.remove(ref)

    def failure(self, ref: AdapterRef) -> Exception | None:
        return LookupError(ref) if ref in self.broken else None

    def reading(self, ref: AdapterRef) -> bool:
        return ref in self.unread

    def pinned(self, ref: AdapterRef) -> bool:
        return False

    def size(self, ref: AdapterRef) -> int:
        return 100

    def needs(self, ref: AdapterRef) -> int:
        return 0

    def lacks_pages(self, ref: AdapterRef) -> None:
        """Nobody counts."""

    def to_copy(self, ref: AdapterRef) -> int:
        return 0 if ref in self.loaded else 100

    def activate(self, ref: AdapterRef) -> Activated | None:
        if ref in self.unread:
            return None
        self.loaded.add(ref)
        return Activated(LoraWeights(LoraSettings(), {}), {})

    def deactivate(self, ref: AdapterRef) -> None:
        pass


class FewAdapters(BareAdapters):
    """There is room for so many adapters at a time; one that no sequence uses leaves at once."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self._places, self.users = places, dict[AdapterRef, int]()

    def needs(self, ref: AdapterRef) -> int:
        return 0 if ref in self.users or len(self.users) < self._places else FULL

    def to_copy(self, ref: AdapterRef) -> int:
        return 0 if ref in self.users else 100

    def activate(self, ref: AdapterRef) -> Activated | None:
        if self.needs(ref) or ref in self.unread:
            return None
        self.users[ref] = self.users.get(ref, 0) + 1
        return Activated(LoraWeights(LoraSettings(), {}), {})

    def deactivate(self, ref: AdapterRef) -> None:
        self.users[ref] -= 1
        if not self.users[ref]:
            del self.users[ref]


def next_scheduled(scheduler: Scheduler, now: float = 0.0) -> list[Scheduled]:
    """What the next step computes, with all who wait. Nothing changes before the pages are taken."""
    plan = scheduler.propose()
    assert scheduler.propose() is plan, "nothing has changed"
    scheduled = scheduler.commit(plan, now=now)
    for item in scheduled:
        item.request.started = True
    return scheduled
