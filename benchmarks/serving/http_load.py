"""Load on a daemon from a process of its own: a plan on standard input, the samples on standard output, both JSON.

    python -m benchmarks.serving.http_load < plan.json > samples.json

Open loop (`at`: when each request is due) or closed loop (`streams` requests at a time, the next as soon
as one has ended). Times come from the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque

import aiohttp
import msgspec

from coserve.workloads.replay import Sample

NEVER = 1e9
"""Seconds."""


class LoadRequest(msgspec.Struct, frozen=True):
    """One request. `at`: seconds after the plan's start; not used in a closed loop."""

    index: int
    prompt: list[int]
    max_tokens: int
    adapter: str | None = None
    at: float = 0.0
    slo: dict[str, float] = {}
    """Latency targets: fields of the request's body."""


class LoadPlan(msgspec.Struct, frozen=True):
    """`start`: on the monotonic clock. `streams`: None for an open loop. `until`: seconds after the start at which
    requests are cut off."""

    url: str
    start: float
    requests: list[LoadRequest]
    streams: int | None = None
    timeout: float = 120.0
    until: float = NEVER


class _Error(msgspec.Struct):
    code: str


class _Event(msgspec.Struct):
    """The fields of an event that are read."""

    token_ids: list[int] = []
    error: _Error | None = None


_decoder = msgspec.json.Decoder(_Event)


async def send(session: aiohttp.ClientSession, plan: LoadPlan, request: LoadRequest) -> Sample:
    """One streamed generation. In a closed loop it is due when sent."""
    sent = time.monotonic() - plan.start
    body = {
        "prompt": request.prompt,
        "adapter": request.adapter,
        "max_tokens": request.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
    } | request.slo
    times: list[float] = []
    tokens, error = 0, None
    try:
        async with (
            asyncio.timeout(min(plan.timeout, plan.until - sent)),
            session.post("/generate", json=body) as response,
        ):
            rest = b""
            async for chunk in response.content.iter_any():
                *events, rest = (rest + chunk).split(b"\n\n")
                now = time.monotonic() - plan.start
                for event in events:
                    new, error = read(event) if error is None else (0, error)
                    if new:
                        times.append(now)
                        tokens += new
            if response.status != 200:
                error = read(b"data: " + rest)[1]
    except (TimeoutError, aiohttp.ClientError) as failure:
        error = type(failure).__name__
    return Sample(
        index=request.index,
        adapter=request.adapter,
        due=sent if plan.streams is not None else request.at,
        sent=sent,
        times=tuple(times),
        tokens=tokens,
        finished=time.monotonic() - plan.start,
        error=error or (None if tokens == request.max_tokens else "too_few_tokens"),
    )


def read(event: bytes) -> tuple[int, str | None]:
    """New tokens of a server-sent event, and the code of an error if it is one."""
    data = event[event.index(b"data: ") + 6 :]
    if data == b"[DONE]":
        return 0, None
    found = _decoder.decode(data)
    return len(found.token_ids), None if found.error is None else found.error.code


async def run(plan: LoadPlan) -> list[Sample]:
    samples: list[Sample] = []
    requests = deque(plan.requests)

    async def stream(session: aiohttp.ClientSession) -> None:
        while requests:
            samples.append(await send(session, plan, requests.popleft()))

    async def one(session: aiohttp.ClientSession, request: LoadRequest) -> None:
        samples.append(await send(session, plan, request))

    connector = aiohttp.TCPConnector(limit=0, force_close=False)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(plan.url, connector=connector, timeout=timeout) as session:
        await asyncio.sleep(plan.start - time.monotonic())
        async with asyncio.TaskGroup() as group:
            for _ in range(plan.streams or 0):
                group.create_task(stream(session))
            while plan.streams is None and requests:
                request = requests.popleft()
                await asyncio.sleep(plan.start + request.at - time.monotonic())
                group.create_task(one(session, request))
    return samples


def main() -> None:
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=LoadPlan)
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(run(plan))))


if __name__ == "__main__":
    main()
