"""How far a rank is with the commands of rank 0."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from coserve.ranks import Heartbeat


class Progress:
    """Changed by the thread that executes commands, read by that of the heartbeats."""

    def __init__(self) -> None:
        self._done, self._since = 0, 0.0

    @contextmanager
    def command(self, number: int) -> Iterator[None]:
        """Around the execution of the command of this number."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since, self._done = 0.0, number

    def heartbeat(self) -> Heartbeat:
        since = self._since
        return Heartbeat(self._done, time.monotonic() - since if since else 0.0)
