"""What must not hold other streams up: adapter imports, cancelled requests, a reader that stops reading."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from benchmarks.serving.http_case import ADAPTERS

IMPORTS, CANCELS, BURST = 64, 200, 10
READER_TOKENS = 900


async def churn(url: str, *, start: float, seconds: float) -> dict[str, Any]:
    """From `start` (monotonic clock) on, over `seconds`: all imports one after another, the cancels in bursts, one
    reader that never reads. Returns what was done."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        await asyncio.sleep(start - time.monotonic())
        reader = _stalled_reader(url)
        try:
            imports, cancels = await asyncio.gather(
                _imports(session, start + seconds), _cancels(session, start, seconds)
            )
        finally:
            reader.close()
    return imports | cancels


async def _imports(session: aiohttp.ClientSession, end: float) -> dict[str, Any]:
    """Imports one after another; those that would begin after `end` are left out."""
    began, done, refused = time.monotonic(), 0, list[str]()
    for i in range(IMPORTS):
        if time.monotonic() > end:
            break
        body = {"name": f"churn-{i:02d}", "path": f"a{i % ADAPTERS:02d}"}
        async with session.post("/adapters", json=body) as answer:
            if answer.status < 300:
                done += 1
            else:
                refused.append((await answer.text())[:200])
    return {"imports": done, "imports_s": round(time.monotonic() - began, 2), "imports_refused": refused[:3]}


async def _cancels(session: aiohttp.ClientSession, start: float, seconds: float) -> dict[str, int]:
    """Bursts of requests that are cancelled at their first bytes, at even distances."""
    bursts = CANCELS // BURST
    found = list[bool]()
    for burst in range(bursts):
        await asyncio.sleep(start + burst * seconds / bursts - time.monotonic())
        requests = [_cancelled(session, burst * BURST + i) for i in range(BURST)]
        found += await asyncio.gather(*requests)
    return {"cancels": sum(found), "cancels_refused": found.count(False)}


async def _cancelled(session: aiohttp.ClientSession, i: int) -> bool:
    """Whether the request was running when its connection was closed."""
    async with session.post("/generate", json=_body([2000 + i] * 16, f"a{i % ADAPTERS:02d}")) as answer:
        await answer.content.readany()
        answer.close()
        return answer.status == 200


def _body(prompt: list[int], adapter: str) -> dict[str, Any]:
    body = {"prompt": prompt, "adapter": adapter, "max_tokens": READER_TOKENS, "stream": True}
    return body | {"temperature": 0.0, "ignore_eos": True}


def _stalled_reader(url: str) -> socket.socket:
    """A connection with a small buffer that asks for a long stream and reads nothing of it."""
    where = urlsplit(url)
    assert where.hostname is not None and where.port is not None, f"expected a URL with host and port, got {url}"
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((where.hostname, where.port))
    body = json.dumps(_body([1000] * 16, "a00")).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"  # noqa: E501
    connection.sendall(head.encode() + body)
    return connection
