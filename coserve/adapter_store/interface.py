"""What the engine needs of the host memory for adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from coserve.types import AdapterDigests, AdapterRef


class Adapters(Protocol):
    """What the engine needs of `adapters.Residency`."""

    def expect(self, ref: AdapterRef, digests: AdapterDigests) -> None: ...
    def missing(self, ref: AdapterRef) -> bool: ...
    def read(self, ref: AdapterRef) -> Callable[[], None]: ...
    def drop(self, ref: AdapterRef) -> None: ...
    def resident(self) -> tuple[AdapterRef, ...]: ...
