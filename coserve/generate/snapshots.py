"""Snapshots of recurrent states: which prefixes have one, and which prompts leave one. No tensors.

A sequence with recurrent states can begin behind a cached prefix only where the state at its end was kept, too. A
snapshot lies in pages of the pool, which have keys of their own: they are found, cached and evicted as other pages are.
A prompt leaves one near its end, for the next turn of a chat, and one where it leaves the longest cached prefix: there
other prompts will probably go on differently, too (Marconi, MLSys '25; vLLM and SGLang do alike).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from coserve.generate.plan import Scheduled
from coserve.generate.sources import PageSource
from coserve.queues.request import Request, Snapshot

LARGEST = 8
"""A snapshot takes at most so many times the pages of the tokens that it spares."""


class Snapshots:
    """The snapshots of one pool of pages."""

    def __init__(self, pages: PageSource) -> None:
        self._pages, self._size = pages, pages.state_pages
        """`_size`: pages of one."""
        self._least = -(-self._size // LARGEST)
        """Fewest pages of tokens between two snapshots of a prompt."""

    def find(self, request: Request, found: list[int]) -> list[int]:
        """Shorten `found`, the cached pages of a request's prefix, to the longest prefix that has a snapshot. Return
        the snapshot's pages, each with one more reference."""
        keys, end, pages = _keys(request, len(found)), len(found), list[int]()
        while end and not (pages := self._hold(keys[end - 1])):
            end -= 1
        self._pages.free(found[end:])
        del found[end:]
        return pages

    def stops(self, request: Request, cached: int) -> tuple[int, ...]:
        """Return after how many tokens of its prompt a request that becomes active is to leave snapshots. `cached`:
        leading pages that were found, with a snapshot or without."""
        if request.keys is None:
            return ()
        size, at, stops = self._pages.page_tokens, request.shared, list[int]()
        end = request.prompt_tokens // size - 1  # chat templates end a prompt with tokens that the next turn has not
        for page in (min(cached, end), end):
            if page - at >= self._least:
                stops.append(page * size)
                at = page
        return tuple(stops)

    def take_pages(self, scheduled: Iterable[Scheduled]) -> None:
        """Take pages for the snapshots of a step, as far as there are free ones. Call it once the step has its own."""
        begun = set[bytes]()
        for item in scheduled:
            request, tokens = item.request, item.request.computed + item.tokens
            if tokens in request.stops:
                key = self._key(request, tokens)
                self._pages.free(known := self._hold(key))
                if not known and key not in begun and (pages := self._pages.allocate(self._size)):
                    request.kept = Snapshot(tokens, pages)
                    begun.add(key)

    def settle(self, request: Request) -> None:
        """Let go of the snapshots that the request's last step read and wrote. What was written can be found from now
        on."""
        self._pages.free(request.restored)
        request.restored = []
        if (kept := request.kept) is not None:
            if request.keys is not None and request.computed >= kept.tokens:  # otherwise the step failed
                self._drop(key := self._key(request, kept.tokens))
                for page, part in zip(kept.pages, self._parts(key), strict=True):
                    self._pages.label(page, part)
            self._pages.free(kept.pages)
            request.kept = None

    def leave(self, request: Request) -> None:
        """Settle a request that frees its pages. What of its prefix is cached in others' pages, and the snapshots that
        it began from and left, are evicted when its own pages are, not before."""
        self.settle(request)
        if request.keys is not None:
            self._pages.free(self._pages.find(request.keys.first(request.labelled, request.tokens)))
        for key in self._ends(request):
            self._pages.free(self._hold(key))
        request.stops = ()

    def forget(self, request: Request) -> None:
        """Remove the snapshots that the request began from and left."""
        for key in self._ends(request):
            self._drop(key)

    def _ends(self, request: Request) -> list[bytes]:
        """Keys of the snapshots that the request began from or left."""
        if request.keys is None:
            return []
        begun = request.shared * self._pages.page_tokens
        return [self._key(request, tokens) for tokens in (begun, *request.stops) if tokens]

    def _key(self, request: Request, tokens: int) -> bytes:
        """The key of the snapshot after the request's first `tokens` tokens: that of their last page."""
        return _keys(request, tokens // self._pages.page_tokens)[-1]

    def _hold(self, key: bytes) -> list[int]:
        """Find a snapshot: its pages, each with one more reference; none if there is none. One that was evicted in part
        is dropped."""
        pages = self._pages.find(self._parts(key))
        if 0 < len(pages) < self._size:
            self._pages.free(pages)
            self._drop(key)
            return []
        return pages

    def _drop(self, key: bytes) -> None:
        """Remove what there is of a snapshot: its parts cannot be found any more, nor become parts of another one."""
        for part in self._parts(key):
            for page in (pages := self._pages.find((part,))):
                self._pages.unlabel(page)
            self._pages.free(pages)

    def _parts(self, key: bytes) -> Iterator[bytes]:
        """The keys of a snapshot's pages: longer ones than those of pages of tokens."""
        return (key + number.to_bytes(4) for number in range(self._size))


def _keys(request: Request, pages: int) -> Sequence[bytes]:
    """The keys of the request's first `pages` pages."""
    assert request.keys is not None, "expected a request that shares pages"
    return request.keys.first(pages, request.tokens)
