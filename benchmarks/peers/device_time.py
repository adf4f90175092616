"""Where the time of coserve's device goes, from two reads of `/metrics`: steps by kind, beside training or not, and
slices."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import aiohttp

from benchmarks.common.metrics import metric_values

STEPS, STEP_SECONDS = "coserve_generation_steps_total", "coserve_generation_step_seconds_total"
SLICES = "coserve_train_seconds_total"


@dataclass(frozen=True)
class Counters:
    """What the engine has counted until the time `at`, on the monotonic clock. `steps` and `seconds`: by kind, such as
    `prefill` or `decode.beside`."""

    at: float
    steps: dict[str, float]
    seconds: dict[str, float]
    slices: float


async def read_counters(url: str) -> Counters:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        response.raise_for_status()
        return counters_of(await response.text(), time.monotonic())


class Window:
    """Reads the counters when arrivals begin, and `seconds` later. The engine reports once a second, so each read may
    be as old."""

    def __init__(self, url: str, seconds: float) -> None:
        self._url, self._seconds = url, seconds
        self._reading: asyncio.Task[dict[str, object]] | None = None

    def begins(self, start: float) -> None:
        """On the monotonic clock."""
        self._reading = asyncio.create_task(self._read(start))

    async def _read(self, start: float) -> dict[str, object]:
        await asyncio.sleep(start - time.monotonic())
        before = await read_counters(self._url)
        await asyncio.sleep(start + self._seconds - time.monotonic())
        return device_time(before, await read_counters(self._url))

    async def found(self) -> dict[str, object]:
        assert self._reading is not None, "it has begun"
        return await self._reading


def counters_of(page: str, at: float) -> Counters:
    slices = sum(metric_values(page, SLICES).values())
    return Counters(at, _by_kind(page, STEPS), _by_kind(page, STEP_SECONDS), slices)


def _by_kind(page: str, name: str) -> dict[str, float]:
    found = dict[str, float]()
    for labels, value in metric_values(page, name).items():
        of = dict(labels)
        found[of["kind"] + ".beside" * (of["beside_training"] == "true")] = value
    return found


def device_time(before: Counters, after: Counters) -> dict[str, object]:
    """Of each kind of step how many a second, their mean milliseconds and their share of the time; and the share of
    training's slices. Where both run at once, shares add up to more than 1."""
    elapsed = after.at - before.at
    found: dict[str, object] = {"train_share": round((after.slices - before.slices) / elapsed, 4)}
    for kind, count in sorted(after.steps.items()):
        steps = count - before.steps.get(kind, 0.0)
        seconds = after.seconds[kind] - before.seconds.get(kind, 0.0)
        if steps:
            found[kind] = {
                "per_s": round(steps / elapsed, 2),
                "ms": round(1e3 * seconds / steps, 2),
                "share": round(seconds / elapsed, 4),
            }
    return found
