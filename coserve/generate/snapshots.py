"""The prefix cache of recurrent states: which prefixes have a snapshot, and which prompts save one. No tensors.

A request can begin behind a cached prefix only where the recurrent states at the prefix's end were saved, too. Such a
snapshot lies in pages of the pool under keys of its own, and is found and evicted as pages of keys and values are. A
prompt saves one near its end, for the next turn of a chat, and one where it departs from the longest cached prefix:
there other prompts will probably depart, too (Marconi, MLSys '25; vLLM and SGLang do alike).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from coserve.generate.plan import Scheduled
from coserve.generate.sources import PageSource
from coserve.queues.request import Request, Snapshot

MOST_PAGES = 8
"""A snapshot is worth saving if it takes at most this many pages for each page of tokens that a later request need not
compute."""


class Snapshots:
    """The snapshots of one pool of pages."""

    def __init__(self, pages: PageSource) -> None:
        self._pages, self._size = pages, pages.state_pages
        """`_size`: pages of one snapshot."""
        self._spacing = -(-self._size // MOST_PAGES)
        """Fewest pages of tokens between two snapshots of a prompt."""

    def find(self, request: Request, found: list[int]) -> list[int]:
        """Shorten `found`, the cached pages of a request's prefix, to the longest prefix that has a snapshot, and free
        the others. Return the snapshot's pages, each with one more reference; none if no prefix has one."""
        keys, end, pages = _keys(request, len(found)), len(found), list[int]()
        while end and not (pages := self._hold(keys[end - 1])):
            end -= 1
        self._pages.free(found[end:])
        del found[end:]
        return pages

    def choose(self, request: Request, cached: int) -> tuple[int, ...]:
        """Return after how many tokens of its prompt a request that becomes active is to save snapshots. `cached`:
        leading pages that were found, with a snapshot or without."""
        if request.keys is None:
            return ()
        size, last, chosen = self._pages.page_tokens, request.shared, list[int]()
        end = request.prompt_tokens // size - 1  # chat templates end a prompt with tokens that the next turn has not
        for page in (min(cached, end), end):
            if page - last >= self._spacing:
                chosen.append(page * size)
                last = page
        return tuple(chosen)

    def take_pages(self, scheduled: Iterable[Scheduled]) -> None:
        """Take pages for the snapshots that a step saves, if they are free. Call it once the step has its own pages."""
        taken = set[bytes]()
        for item in scheduled:
            request, tokens = item.request, item.request.computed + item.tokens
            if tokens in request.snapshots_at:
                key = self._key(request, tokens)
                self._pages.free(known := self._hold(key))
                if not known and key not in taken and (pages := self._pages.allocate(self._size)):
                    request.saved = Snapshot(tokens, pages)
                    taken.add(key)

    def settle(self, request: Request) -> None:
        """Free the snapshots that the request's last step restored and saved. The saved one stays in the cache, to be
        found from now on."""
        self._pages.free(request.restored)
        request.restored = []
        if (saved := request.saved) is not None:
            if request.keys is not None and request.computed >= saved.tokens:  # otherwise the step failed
                self._drop(key := self._key(request, saved.tokens))
                for page, part in zip(saved.pages, self._parts(key), strict=True):
                    self._pages.label(page, part)
            self._pages.free(saved.pages)
            request.saved = None

    def leave(self, request: Request) -> None:
        """Settle a request that frees its pages, and mark as just used the cached pages of its prefix that are not its
        own, and the snapshots that it began from and saved: they are evicted when its own pages are, not before."""
        self.settle(request)
        if request.keys is not None:
            self._pages.free(self._pages.find(request.keys.first(request.labelled, request.tokens)))
        for key in self._own_keys(request):
            self._pages.free(self._hold(key))
        request.snapshots_at = ()

    def forget(self, request: Request) -> None:
        """Remove the snapshots that the request began from and saved."""
        for key in self._own_keys(request):
            self._drop(key)

    def _own_keys(self, request: Request) -> list[bytes]:
        """Keys of the snapshots that the request began from or saved."""
        if request.keys is None:
            return []
        begun = request.shared * self._pages.page_tokens
        return [self._key(request, tokens) for tokens in (begun, *request.snapshots_at) if tokens]

    def _key(self, request: Request, tokens: int) -> bytes:
        """The key of the snapshot after the request's first `tokens` tokens: that of their last page."""
        return _keys(request, tokens // self._pages.page_tokens)[-1]

    def _hold(self, key: bytes) -> list[int]:
        """Return a snapshot's pages, each with one more reference; none if there is none. One that was evicted in part
        is dropped."""
        pages = self._pages.find(self._parts(key))
        if 0 < len(pages) < self._size:
            self._pages.free(pages)
            self._drop(key)
            return []
        return pages

    def _drop(self, key: bytes) -> None:
        """Remove what is left of a snapshot, so that its pages are never found beside those of a later one."""
        for part in self._parts(key):
            for page in (pages := self._pages.find((part,))):
                self._pages.unlabel(page)
            self._pages.free(pages)

    def _parts(self, key: bytes) -> Iterator[bytes]:
        """The keys of a snapshot's pages. They are longer than those of pages of tokens, so they never equal one."""
        return (key + number.to_bytes(4) for number in range(self._size))


def _keys(request: Request, pages: int) -> Sequence[bytes]:
    """The keys of the request's first `pages` pages."""
    assert request.keys is not None, "expected a request that shares pages"
    return request.keys.first(pages, request.tokens)
