"""Stands in for uvloop, which vLLM's server imports, where it is not installed: asyncio's own loop. Last on vLLM's
import path."""

from __future__ import annotations

import asyncio

run = asyncio.run
new_event_loop = asyncio.new_event_loop
EventLoopPolicy = asyncio.DefaultEventLoopPolicy


def install() -> None:
    """Nothing to do: asyncio uses its own loop."""
