"""Pages, and adapters in them, without tensors, and a scheduler's steps without a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coserve.core.types import AdapterDigests, AdapterRef, LoraSettings
from coserve.generate.plan import Share
from coserve.generate.schedule import Scheduler
from coserve.lora.store.pages import Activated
from coserve.memory.pages import PagePool
from coserve.model.lora import LoraWeights


class BarePages:
    """A pool with no tensors."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        self.pool, self.page_tokens = PagePool(pages), page_tokens

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


def next_shares(scheduler: Scheduler) -> list[Share]:
    """What the next step computes, with all who wait. Nothing changes before the pages are taken."""
    plan = scheduler.propose()
    assert scheduler.propose() is plan, "nothing has changed"
    shares = scheduler.commit(plan)
    for share in shares:
        share.request.started = True
    return shares
