"""Expected queueing delay of requests, for shedding. Pure: no torch, no IO, no clock."""

from __future__ import annotations

from coserve.queues.inference import RETRY_AT_LEAST, RETRY_AT_MOST

MEMORY = 32
"""Admissions after which one counts 1/e of a new one, in the admission rate."""
LEFT_ON_ARRIVAL = 0.5
"""Mean fraction of the gap between admissions that is left when a request arrives."""


class QueueSpeed:
    """Learns the time between admissions while requests wait behind a full batch. Training gets next to nothing then
    (`train_floor`, `train_patience`), so it is about the speed of inference without training; with `Spatial`, of
    inference overlapped with training."""

    def __init__(self) -> None:
        self._since: float | None = None
        """Start of the gap being measured: the last admission, or when a request began to wait; None: nobody waits."""
        self._last = 0.0
        """When the last request was admitted, whether others waited or not."""
        self._seconds = self._admissions = 0.0

    def began_to_wait(self) -> None:
        """A request came to an empty queue: forget the past, which does not predict its wait."""
        self._since, self._seconds, self._admissions = None, 0.0, 0.0

    def admitted(self, count: int, now: float, *, others_wait: bool) -> None:
        """`count` requests have left the queue. `others_wait`: further ones wait behind a full batch."""
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
        """Expected seconds until a request behind `ahead` others is admitted; 0: unknown. While the batch is `full`,
        the gap since the last admission counts as one more sample if it is longer, so the speed is known before anyone
        who waited was admitted."""
        gap, since = self.gap, now - self._last
        if full and since > gap:
            gap = (self._seconds + since) / (self._admissions + 1)
        return (ahead + LEFT_ON_ARRIVAL) * gap

    @property
    def gap(self) -> float:
        """Expected seconds from one admission to the next; 0: not known."""
        return self._seconds / self._admissions if self._admissions else 0.0


def retry_after(seconds: float) -> float:
    """Clamp `seconds` to the bounds of `Retry-After`."""
    return min(max(seconds, RETRY_AT_LEAST), RETRY_AT_MOST)
