"""Retries work after storage errors, with back-off. Logs one line when retries begin and one when they end."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from coserve.core.errors import StorageError

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Backoff:
    """Schedule of attempts: waits in seconds of `first`, then doubled up to `longest`, until their sum is `total`
    (None: without end)."""

    first: float = 0.05
    longest: float = 2.0
    total: float | None = None

    def delays(self) -> Iterator[float]:
        delay, waited = self.first, 0.0
        while self.total is None or waited < self.total:
            yield delay
            waited += delay
            delay = min(2 * delay, self.longest)


FOR_EVER = Backoff(first=0.25, longest=30.0)
"""Back-off for jobs and their events, which must not fail because a file cannot be read or written now."""


class Retries:
    """Runs work until it succeeds. Only `errors` are retried.

    `sleep` takes seconds. `changed` is called on the working thread when `notes` change.
    """

    def __init__(
        self,
        backoff: Backoff,
        *,
        errors: type[StorageError] = StorageError,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._backoff, self._errors, self._sleep, self._changed = backoff, errors, sleep, changed
        self._lock = threading.Lock()
        self._failing: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about work that is being retried, and why; for /health."""
        with self._lock:
            return tuple(f"{what}: {reason}; it is tried again" for what, reason in self._reasons.items())

    async def run(self, what: str, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `work`, on the event loop. Raises its last error when the back-off has ended, and other
        errors at once.

        `what` names the work in the log and in `notes`; calls with the same name that fail together are logged once.
        """
        with self._attempts(what) as failed:
            while True:
                try:
                    return await work()
                except self._errors as error:
                    delay = failed(error)
                await self._sleep(delay)

    def run_blocking(self, what: str, work: Callable[[], T], wait: Callable[[float], None]) -> T:
        """Do as `run`, for work on a thread that may block. `wait` takes seconds; an exception from it ends the
        retries."""
        with self._attempts(what) as failed:
            while True:
                try:
                    return work()
                except self._errors as error:
                    delay = failed(error)
                wait(delay)

    @contextmanager
    def _attempts(self, what: str) -> Iterator[Callable[[StorageError], float]]:
        """Open the context of all attempts of one call. Yields a function that takes an attempt's error and returns the
        seconds to the next attempt, or raises the error when the back-off has ended."""
        delays, failures, waited, given_up = self._backoff.delays(), 0, 0.0, False

        def failed(error: StorageError) -> float:
            nonlocal failures, waited, given_up
            delay = next(delays, None)
            if delay is None:
                given_up = True
                raise error
            failures += 1
            waited += delay
            self._report(what, error, first=failures == 1)
            return delay

        outcome, level = "no longer tried again", logging.INFO
        try:
            yield failed
            outcome = f"works again after {failures + 1} attempts"
        finally:
            if given_up:
                outcome, level = f"given up after {waited:.3g} s", logging.WARNING
            if failures:
                self._finish(what, outcome, level)

    def _report(self, what: str, error: StorageError, *, first: bool) -> None:
        with self._lock:
            if not self._failing[what]:
                log.warning("%s: %s; trying again", what, error.message)
            self._failing[what] += first
            self._reasons[what] = error.message
        self._changed()

    def _finish(self, what: str, outcome: str, level: int) -> None:
        with self._lock:
            self._failing[what] -= 1
            if not self._failing[what]:
                del self._failing[what], self._reasons[what]
                log.log(level, "%s: %s", what, outcome)
        self._changed()
