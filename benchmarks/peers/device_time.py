"""Where the time of coserve's device goes, from two reads of `/metrics`: steps by kind, beside training or not, and
slices."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

STEPS, STEP_SECONDS, SLICES = (
    "coserve_generation_steps_total",
    "coserve_generation_step_seconds_total",
    "coserve_train_seconds_total",
)


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
    steps, seconds, slices = dict[str, float](), dict[str, float](), 0.0
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in (STEPS, STEP_SECONDS):
                beside = sample.labels["beside_training"] == "true"
                kind = sample.labels["kind"] + (".beside" if beside else "")
                (steps if sample.name == STEPS else seconds)[kind] = sample.value
            elif sample.name == SLICES:
                slices = sample.value
    return Counters(at, steps, seconds, slices)


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
