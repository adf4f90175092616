"""Snapshots of recurrent states: which prefixes have one, and which prompts leave one. No tensors.

A sequence with recurrent states can begin behind a cached prefix only where the state at its end was kept, too. A
snapshot lies in pages of the pool, which have keys of their own: they are found, cached and evicted as other pages are.
A prompt leaves one near its end, for the next turn of a chat, and one where it leaves the longest cached prefix: there
other prompts will probably go on differently, too (Marconi, MLSys '25; vLLM and SGLang do alike).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
        end, pages = len(found), list[int]()
        while end and not (pages := self._hold(request, end)):
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
                end = tokens // self._pages.page_tokens
                self._pages.free(known := self._hold(request, end))
                first = next(self._keys(request, end))
                if not known and first not in begun and (pages := self._pages.allocate(self._size)):
                    request.kept = Snapshot(tokens, pages)
                    begun.add(first)

    def settle(self, request: Request) -> None:
        """Let go of the snapshots that the request's last step read and wrote. What was written can be found from now
        on."""
        self._pages.free(request.restored)
        request.restored = []
        if (kept := request.kept) is not None:
            if request.keys is not None and request.computed >= kept.tokens:  # otherwise the step failed
                keys = self._keys(request, kept.tokens // self._pages.page_tokens)
                for page, key in zip(kept.pages, keys, strict=True):
                    self._pages.label(page, key)
            self._pages.free(kept.pages)
            request.kept = None

    def leave(self, request: Request) -> None:
        """Settle a request that frees its pages. What of its prefix is cached in others' pages, and the snapshots that
        it began from and left, are evicted when its own pages are, not before."""
        self.settle(request)
        if request.keys is not None:
            self._pages.free(self._pages.find(request.keys.first(request.labelled, request.tokens)))
        for end in self._ends(request):
            self._pages.free(self._hold(request, end))
        request.stops = ()

    def forget(self, request: Request) -> None:
        """Remove the snapshots that the request began from and left."""
        for end in self._ends(request):
            self._drop(self._hold(request, end))

    def _ends(self, request: Request) -> list[int]:
        """Number of pages before each snapshot that the request began from or left."""
        if request.keys is None:
            return []
        return [end for end in (request.shared, *(stop // self._pages.page_tokens for stop in request.stops)) if end]

    def _hold(self, request: Request, end: int) -> list[int]:
        """Find the snapshot after the request's first `end` pages: its pages, each with one more reference; none if
        there is no snapshot. One that was evicted in part is dropped."""
        pages = self._pages.find(self._keys(request, end))
        if len(pages) == self._size:
            return pages
        self._drop(pages)
        return []

    def _drop(self, pages: list[int]) -> None:
        """Free pages, which cannot be found any more."""
        for page in pages:
            self._pages.unlabel(page)
        self._pages.free(pages)

    def _keys(self, request: Request, end: int) -> Iterator[bytes]:
        """The keys of the snapshot after the request's first `end` pages: longer ones than those of their tokens."""
        assert request.keys is not None, "expected a request that shares pages"
        key = request.keys.first(end, request.tokens)[-1]
        return (key + number.to_bytes(4) for number in range(self._size))
