"""Rates of requests and tokens, by project: token buckets that hold one minute's worth. Pure but for the clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from coserve.core.access.schemas import Quota
from coserve.core.errors import QuotaExceeded

MINUTE = 60.0


class Bucket:
    """A token bucket of `limit` units that refills within a minute. `take` may leave less than 0."""

    def __init__(self, limit: int, now: float) -> None:
        self.limit, self._level, self._at = limit, float(limit), now

    def level(self, now: float) -> float:
        """Units left; negative if more were taken than there were."""
        self._level = min(float(self.limit), self._level + (now - self._at) * self.limit / MINUTE)
        self._at = now
        return self._level

    def take(self, units: int, now: float) -> None:
        self._level = self.level(now) - units

    def wait(self, units: int, now: float) -> float:
        """Seconds until `units` are available."""
        return max(0.0, (units - self.level(now)) * MINUTE / self.limit)


class Quotas:
    """The quotas of all projects, and what is left of their rates. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._quotas: dict[str, Quota] = {}
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}

    @property
    def all(self) -> Mapping[str, Quota]:
        """Quotas by project."""
        return self._quotas

    def of(self, project: str) -> Quota:
        return self._quotas.get(project, Quota())

    def set(self, project: str, quota: Quota) -> None:
        """Replace a project's quota; its buckets are full again."""
        self._quotas[project] = quota
        for buckets, limit in ((self._requests, quota.requests_per_minute), (self._tokens, quota.tokens_per_minute)):
            buckets.pop(project, None)
            if limit is not None:
                buckets[project] = Bucket(limit, self._clock())

    def admit(self, project: str) -> None:
        """Count a request. Raises `QuotaExceeded` if the project has none left, or no tokens."""
        now = self._clock()
        for what, buckets in (("requests", self._requests), ("tokens", self._tokens)):
            if (bucket := buckets.get(project)) is not None and (wait := bucket.wait(1, now)) > 0:
                why = f"project {project} may use {bucket.limit} {what} a minute; try again in {math.ceil(wait)} s"
                raise QuotaExceeded(why, retry_after=wait)
        if (bucket := self._requests.get(project)) is not None:
            bucket.take(1, now)

    def charge(self, project: str, tokens: int) -> None:
        """Count tokens that were read or generated."""
        if (bucket := self._tokens.get(project)) is not None:
            bucket.take(tokens, self._clock())

    def headers(self, project: str) -> dict[str, str]:
        """OpenAI's headers for the rates that the project's quota limits."""
        now, found = self._clock(), dict[str, str]()
        for what, buckets in (("requests", self._requests), ("tokens", self._tokens)):
            if (bucket := buckets.get(project)) is not None:
                found[f"x-ratelimit-limit-{what}"] = str(bucket.limit)
                found[f"x-ratelimit-remaining-{what}"] = str(max(0, math.floor(bucket.level(now))))
                found[f"x-ratelimit-reset-{what}"] = duration(bucket.wait(bucket.limit, now))
        return found


def duration(seconds: float) -> str:
    """Return a time as OpenAI's headers have it: `12ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    minutes, rest = divmod(seconds if seconds < MINUTE else round(seconds), MINUTE)
    return f"{minutes:.0f}m{rest:.0f}s" if minutes else f"{rest:.1f}s"
