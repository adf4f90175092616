"""The interface of an object that repeats a store's copies elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from coserve.core.types import AdapterRef
from coserve.memory.pages import Span


class CopyMirror(Protocol):
    """Repeats a store's copies of adapters, for instance on another tensor-parallel rank. Called on the event loop."""

    def loaded(self, ref: AdapterRef, span: Span, moved: Mapping[int, int]) -> None:
        """Move the contents of pages (`moved`: old -> new page), then copy the adapter's host copy into the span."""

    def dropped(self, ref: AdapterRef) -> None:
        """Drop the adapter's host copy, if there is one."""


class NoMirror:
    """A `CopyMirror` that does nothing."""

    def loaded(self, ref: AdapterRef, span: Span, moved: Mapping[int, int]) -> None:
        """See `CopyMirror`."""

    def dropped(self, ref: AdapterRef) -> None:
        """See `CopyMirror`."""
