"""Calls of the routes under `/admin`."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec

from coserve.cli.common import retry_policy
from coserve.client.caller import Caller
from coserve.client.transport import HttpTransport

T = TypeVar("T")


def call(url: str, key: str | None, method: str, path: str, type: type[T], body: msgspec.Struct | None = None) -> T:
    """Send one request and decode its answer. Raises the daemon's error, or `Unreachable`."""

    async def send() -> T:
        transport = HttpTransport(url, read_timeout=60.0)
        caller = Caller(transport, api_key=key or None, retry=retry_policy())
        try:
            return await caller.call(method, f"/admin/{path}", type, body=body)
        finally:
            await transport.close()

    return asyncio.run(send())
