"""Load on a daemon from a process of its own: a plan on standard input, the samples on standard output, both JSON.

    python -m benchmarks.http_load < plan.json > samples.json

Open loop (`at`: when each request is due) or closed loop (`streams`: so many at once, each on to its next request as soon
as the last one ended). Times come from the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque

import aiohttp
import msgspec

from coserve.workloads.replay import Sample


class Ask(msgspec.Struct, frozen=True):
    """One request. `at`: seconds after the plan's start; a closed loop does not read it."""

    index: int
    prompt: list[int]
    max_tokens: int
    adapter: str | None = None
    at: float = 0.0


class Plan(msgspec.Struct, frozen=True):
    """`start`: on the monotonic clock. `streams`: None for an open loop."""

    url: str
    start: float
    asks: list[Ask]
    streams: int | None = None
    patience: float = 120.0


class _Error(msgspec.Struct):
    code: str


class _Event(msgspec.Struct):
    """What is read of an event; the rest is skipped."""

    token_ids: list[int] = []
    error: _Error | None = None


_decoder = msgspec.json.Decoder(_Event)


async def send(session: aiohttp.ClientSession, plan: Plan, ask: Ask) -> Sample:
    """One streamed generation. In a closed loop it is due when it is sent."""
    sent = time.monotonic() - plan.start
    body = {
        "prompt": ask.prompt,
        "adapter": ask.adapter,
        "max_tokens": ask.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
    }
    times: list[float] = []
    tokens, error = 0, None
    try:
        async with asyncio.timeout(plan.patience), session.post("/generate", json=body) as response:
            rest = b""
            async for piece in response.content.iter_any():
                *events, rest = (rest + piece).split(b"\n\n")
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
        index=ask.index,
        adapter=ask.adapter,
        due=sent if plan.streams is not None else ask.at,
        sent=sent,
        times=tuple(times),
        tokens=tokens,
        finished=time.monotonic() - plan.start,
        error=error or (None if tokens == ask.max_tokens else "too_few_tokens"),
    )


def read(event: bytes) -> tuple[int, str | None]:
    """New tokens of a server-sent event, and the code of an error if it is one."""
    data = event[event.index(b"data: ") + 6 :]
    if data == b"[DONE]":
        return 0, None
    found = _decoder.decode(data)
    return len(found.token_ids), None if found.error is None else found.error.code


async def run(plan: Plan) -> list[Sample]:
    samples: list[Sample] = []
    asks = deque(plan.asks)

    async def stream(session: aiohttp.ClientSession) -> None:
        while asks:
            samples.append(await send(session, plan, asks.popleft()))

    async def one(session: aiohttp.ClientSession, ask: Ask) -> None:
        samples.append(await send(session, plan, ask))

    connector = aiohttp.TCPConnector(limit=0, force_close=False)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(plan.url, connector=connector, timeout=timeout) as session:
        await asyncio.sleep(plan.start - time.monotonic())
        async with asyncio.TaskGroup() as group:
            for _ in range(plan.streams or 0):
                group.create_task(stream(session))
            while plan.streams is None and asks:
                ask = asks.popleft()
                await asyncio.sleep(plan.start + ask.at - time.monotonic())
                group.create_task(one(session, ask))
    return samples


def main() -> None:
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(run(plan))))


if __name__ == "__main__":
    main()
