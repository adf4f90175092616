"""Which adapter versions requests use, and which are being deleted. Use only on the event loop's thread."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from coserve.core.errors import AdapterBusy
from coserve.core.types import AdapterRef


class AdaptersInUse:
    def __init__(self) -> None:
        self._counts: Counter[AdapterRef] = Counter()
        self._deletions: list[tuple[str, int | None, asyncio.Event]] = []
        """Deletions in progress: name, version (None: all), and the event that is set at the end."""

    def add(self, ref: AdapterRef) -> None:
        """Count one more request that uses the version."""
        self._counts[ref] += 1

    def remove(self, ref: AdapterRef) -> None:
        self._counts[ref] -= 1
        if not self._counts[ref]:
            del self._counts[ref]

    @contextmanager
    def deletion(self, name: str, version: int | None) -> Iterator[None]:
        """Context of the deletion of a version, or of all (None). Raises `AdapterBusy` while requests use one of
        them."""
        if any(_is_of(ref, name, version) for ref in self._counts):
            shown = name if version is None else f"{name}@{version}"
            raise AdapterBusy(f"adapter {shown!r} is in use by running requests", field="id")
        one = name, version, asyncio.Event()
        self._deletions.append(one)
        try:
            yield
        finally:
            self._deletions.remove(one)
            one[2].set()

    def deletion_of(self, ref: AdapterRef) -> asyncio.Event | None:
        """Return the event that ends this version's deletion in progress; None: it is not being deleted."""
        return next((end for name, version, end in self._deletions if _is_of(ref, name, version)), None)


def _is_of(ref: AdapterRef, name: str, version: int | None) -> bool:
    return ref.id == name and version in (None, ref.version)
