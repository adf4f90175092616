"""The line of requests that wait for pages, and who may pass whom. No tensors, no clock."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from coserve.generate.sources import AdapterSource
from coserve.queues.request import Request

PASSED_SECONDS = 0.5
"""Longest time, in seconds, for which later requests may pass one whose adapter finds no room in the pages."""


class Line:
    """Requests in order of entry into the batch.

    They become active in that order, with two exceptions. A request whose adapter's files are being read again is
    passed by all others. A request whose adapter must be copied into pages, and finds no room, is passed by requests
    that need no such copy (their adapters are in pages, or they have none). After `PASSED_SECONDS` nobody passes it any
    more: the active requests end, and it gets their pages.
    """

    def __init__(self, adapters: AdapterSource) -> None:
        self._adapters, self._requests = adapters, list[Request]()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def unpassed(self) -> int:
        """Number of requests that later ones were never allowed to pass."""
        return sum(request.passed_since is None for request in self._requests)

    @property
    def reads(self) -> bool:
        """Whether there are requests, and the files of all their adapters are being read."""
        return bool(self._requests) and all(self._is_read(request) for request in self._requests)

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=number_of)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)
        request.passed_since = None

    def in_turn(self, now: float) -> Iterator[Request]:
        """The requests that may become active now. The caller removes each request that becomes active before it asks
        for the next; one that it leaves found no room."""
        passing = False
        for request in tuple(self._requests):
            if self._is_read(request):
                continue
            copies = request.paged_adapter is not None and self._adapters.to_copy(request.paged_adapter) > 0
            if not (passing and copies):
                yield request
                if request not in self._requests:
                    continue
            if not copies:
                return
            if request.passed_since is None:
                request.passed_since = now
            if now - request.passed_since > PASSED_SECONDS:
                return
            passing = True

    def _is_read(self, request: Request) -> bool:
        return request.paged_adapter is not None and self._adapters.reading(request.paged_adapter)


def number_of(request: Request) -> int:
    """Sort key: order of entry into the batch."""
    return request.number
