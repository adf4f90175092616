"""The interface of what keeps tensor-parallel ranks together while they run work with collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SliceGuard:
    """The guard of processes whose slices have no collectives: it does nothing. See `parallel.lockstep.Lockstep`."""

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
