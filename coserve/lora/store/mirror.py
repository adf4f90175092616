"""Who follows the copies that a store keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from coserve.core.types import AdapterRef
from coserve.memory.pages import Span


class CopyMirror(Protocol):
    """Keeps copies of a store's adapters where the store's are: on another rank, for instance. Called on the event
    loop."""

    def loaded(self, ref: AdapterRef, span: Span, moved: Mapping[int, int]) -> None:
        """The contents of pages were moved (from, to), then the adapter's host copy was copied into the span."""

    def dropped(self, ref: AdapterRef) -> None:
        """The adapter's host copy is not needed any more; there may be none."""


class NoMirror:
    """Implements `CopyMirror`: nobody follows."""

    def loaded(self, ref: AdapterRef, span: Span, moved: Mapping[int, int]) -> None:
        """See `CopyMirror`."""

    def dropped(self, ref: AdapterRef) -> None:
        """See `CopyMirror`."""
