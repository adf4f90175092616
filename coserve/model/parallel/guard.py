"""The interface that keeps tensor-parallel ranks together while they run work with collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class SliceGuard(Protocol):
    """See `parallel.lockstep.Lockstep`."""

    def begin(self, device: torch.device) -> None: ...
    def check(self) -> None: ...
    def end(self) -> None: ...
    def abort(self) -> None: ...
    def finish_collectives(self) -> None: ...


class NoPeers:
    """A `SliceGuard` that does nothing, for processes whose slices have no collectives."""

    def begin(self, device: torch.device) -> None:
        pass

    def check(self) -> None:
        pass

    end = abort = finish_collectives = check


@contextmanager
def aborting_on_error(guard: SliceGuard) -> Iterator[None]:
    """Tell the other ranks at once about an error raised inside."""
    try:
        yield
    except Exception:
        guard.abort()
        raise
