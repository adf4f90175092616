"""Interfaces of what a store works with: a mirror that repeats its copies elsewhere, and LoRA servers, which hold the
experts' pairs of adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from coserve.core.health import LoraServerInfo
from coserve.core.types import AdapterRef
from coserve.memory.pages import Span


class CopyMirror:
    """Repeats a store's copies of adapters, for instance on another tensor-parallel rank; this one does nothing. Called
    on the event loop."""

    def loaded(self, ref: AdapterRef, span: Span, moved: Mapping[int, int]) -> None:
        """Move the contents of pages (`moved`: old -> new page), then copy the adapter's host copy into the span."""

    def dropped(self, ref: AdapterRef) -> None:
        """Drop the adapter's host copy, if there is one."""


class RemotePairs(Protocol):
    """The LoRA servers of an engine. An adapter whose pairs of experts they hold takes pages for its other pairs
    only."""

    def slot(self, ref: AdapterRef) -> int:
        """Return the slot in which the servers hold the adapter's pairs now; -1: they do not."""
        ...

    @property
    def losses(self) -> int:
        """How often the servers were lost so far."""
        ...

    def states(self) -> tuple[LoraServerInfo, ...]:
        """Return the state of each server."""
        ...

    @property
    def troubles(self) -> tuple[str, ...]:
        """Notes for the operator."""
        ...

    def close(self) -> None:
        """End the servers."""
        ...
