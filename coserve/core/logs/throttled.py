"""A warning that is logged at most once a minute."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final


class ThrottledLog:
    """Logs the warning `what` to `log` at most once per `INTERVAL` seconds, with the number of warnings suppressed."""

    INTERVAL: Final = 60.0

    def __init__(self, log: logging.Logger, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._what, self._clock = log, what, clock
        self._last: float | None = None
        self._unlogged = 0

    def warn(self, detail: str = "") -> None:
        """Log the warning if it is due. `detail` is appended to `what`."""
        now = self._clock()
        if self._last is not None and now - self._last < self.INTERVAL:
            self._unlogged += 1
            return
        more = f" ({self._unlogged} times more since the last warning)" if self._unlogged else ""
        self._log.warning("%s%s%s", self._what, detail, more)
        self._last, self._unlogged = now, 0
