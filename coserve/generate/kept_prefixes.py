"""KV prefixes of pinned adapters: their pages stay in the pool between requests."""

from __future__ import annotations

from collections.abc import Iterator

from coserve.core.limits import PINNED_SHARE
from coserve.core.types import AdapterRef
from coserve.generate.sources import AdapterSource, PageSource
from coserve.queues.request import Request


class KeptPrefixes:
    """Holds a reference to the full pages of pinned adapters' KV prefixes, so that the prefix cache keeps them while no
    request of the adapter runs. An adapter's pages are those of its first request since it was pinned. Together they
    are at most `PINNED_SHARE` of the pool: others, such as those that were pinned when the pool was larger, are
    as if not pinned."""

    def __init__(self, pages: PageSource, adapters: AdapterSource) -> None:
        self._pages, self._adapters = pages, adapters
        self._held = dict[AdapterRef, list[int]]()

    def __iter__(self) -> Iterator[list[int]]:
        """Yield each prefix's pages, to be renumbered in place where pages move."""
        return iter(self._held.values())

    def keep(self, request: Request) -> None:
        """Hold the pages of an active request's prefix, if its adapter is pinned and they are in the prefix cache."""
        ref, full = request.adapter, request.prefix // self._pages.page_tokens
        if ref is None or not full or ref in self._held or request.keys is None or request.labelled < full:
            return
        kept = self._pages.page_tokens * (full + sum(map(len, self._held.values())))
        if self._adapters.pinned(ref) and kept <= PINNED_SHARE * self._pages.tokens:
            self._held[ref] = [*request.pages[:full]]
            self._pages.hold(self._held[ref])

    def forget(self, ref: AdapterRef) -> None:
        """Free the adapter's pages, if there are some."""
        self._pages.free(self._held.pop(ref, []))

    def forget_unpinned(self) -> None:
        """Free the pages of adapters that are pinned no longer."""
        for ref in [ref for ref in self._held if not self._adapters.pinned(ref)]:
            self.forget(ref)

    def forget_all(self) -> None:
        """Free all pages: a request that is alone does not fit beside them."""
        for ref in [*self._held]:
            self.forget(ref)
