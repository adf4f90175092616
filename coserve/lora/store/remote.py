"""The interface of LoRA servers, as the store sees them: they hold the experts' pairs of adapters."""

from __future__ import annotations

from typing import Protocol

from coserve.core.health import LoraServerInfo
from coserve.core.types import AdapterRef


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
