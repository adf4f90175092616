"""Checks a project's storage quota while bodies of its requests arrive."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from coserve.core.errors import StorageQuotaExceeded
from coserve.core.names import ADAPTER_FILES

STEP_BYTES, STEP_SHARE = 1 << 20, 1 / 64
"""A body is checked once per this many bytes, or per this fraction of the quota if that is less, because each check
reads the database."""


class BodyQuota:
    """Checks the body of one request against its project's storage quota of `limit` bytes. `used` returns the bytes
    that the project has stored; `arriving`: by project, the bytes received of bodies that are not stored yet."""

    def __init__(self, project: str, limit: int, used: Callable[[], Awaitable[int]], arriving: Counter[str]) -> None:
        self._project, self._limit, self._used, self._arriving = project, limit, used, arriving
        self._arrived = self._checked = 0
        """Bytes of the body received so far, and at the last check."""

    async def check(self, more: int = 0) -> None:
        """Raise `StorageQuotaExceeded` if what is stored, what is arriving, and `more` bytes exceed the quota."""
        used = await self._used()
        arriving = self._arriving[self._project] + more
        if used + arriving > self._limit:
            raise StorageQuotaExceeded(
                f"project {self._project} has {used} bytes of files and adapters, and {arriving} more arrive; "
                f"its quota is {self._limit}: delete some"
            )

    async def arrived(self, total: int) -> None:
        """Record that `total` bytes of the body have arrived. Calls `check`, and raises what it raises, about once per
        `STEP_BYTES`."""
        self._arriving[self._project] += total - self._arrived
        self._arrived = total
        if total - self._checked >= min(STEP_BYTES, self._limit * STEP_SHARE):
            self._checked = total
            await self.check()

    def stop_counting(self) -> None:
        """Stop counting the body as arriving: it has been stored or dropped."""
        self._arriving[self._project] -= self._arrived
        self._arrived = 0


BODY_QUOTA = web.RequestKey("body_quota", BodyQuota)
"""Set on requests that store something, of projects with a quota of bytes."""


def stop_counting(request: web.Request) -> None:
    """Stop counting the request's body as arriving."""
    if (quota := request.get(BODY_QUOTA)) is not None:
        quota.stop_counting()


async def check_copy(request: web.Request, folder: Path) -> None:
    """Count the PEFT files in `folder`, which a body named or had as an archive, as arriving until the request ends.
    Raises `StorageQuotaExceeded` if its project has no room for them."""
    if (quota := request.get(BODY_QUOTA)) is not None:
        await quota.arrived(await asyncio.to_thread(_bytes_in, folder))
        await quota.check()


def _bytes_in(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in ADAPTER_FILES if (folder / name).is_file())
