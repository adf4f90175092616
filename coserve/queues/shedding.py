"""How long requests wait for a place in the batch. Pure: no torch, no IO, no clock."""

from __future__ import annotations

from coserve.queues.inference import RETRY_AT_LEAST, RETRY_AT_MOST

MEMORY = 32
"""Admissions after which one counts 1/e of a new one, for the speed at which the batch takes requests."""
LEFT_ON_ARRIVAL = 0.5
"""Share of the time from one admission to the next that is left on average when a request arrives."""


class QueueSpeed:
    """Learns the time from one admission to the next while requests wait behind a full batch. Training has next to
    nothing then (`train_floor`, `train_patience`), so it is about that of inference alone; with `Spatial` it is that of
    inference beside training."""

    def __init__(self) -> None:
        self._since: float | None = None
        """From when the time to the next admission is measured: the last one, or when somebody began to wait; None:
        nobody waits."""
        self._last = 0.0
        """When the last request was admitted, whoever has waited since."""
        self._seconds = self._admissions = 0.0

    def began_to_wait(self) -> None:
        """A request came to an empty queue: neither the time before it nor the work of then says how long it will
        wait."""
        self._since, self._seconds, self._admissions = None, 0.0, 0.0

    def admitted(self, count: int, now: float, *, others_wait: bool) -> None:
        """So many requests have left the queue. `others_wait`: behind a batch that has no place now."""
        if count:
            self._last = now
        if count and self._since is not None:
            fading = (1 - 1 / MEMORY) ** count
            self._seconds = fading * self._seconds + now - self._since
            self._admissions = fading * self._admissions + count
        if not others_wait:
            self._since = None
        elif count or self._since is None:
            self._since = now

    def wait(self, ahead: int, now: float, *, full: bool) -> float:
        """Expected seconds until a request is admitted behind `ahead` others; 0: not known. While the batch is `full`,
        the time since the last admission counts as that of one more where it is longer: so the speed is known before
        anybody who waited was admitted."""
        gap, since = self.gap, now - self._last
        if full and since > gap:
            gap = (self._seconds + since) / (self._admissions + 1)
        return (ahead + LEFT_ON_ARRIVAL) * gap

    @property
    def gap(self) -> float:
        """Expected seconds from one admission to the next; 0: not known."""
        return self._seconds / self._admissions if self._admissions else 0.0


def retry_after(seconds: float) -> float:
    """`seconds`, within the bounds of `Retry-After`."""
    return min(max(seconds, RETRY_AT_LEAST), RETRY_AT_MOST)
