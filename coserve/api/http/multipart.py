"""aiohttp's multipart reader with a limit on lines, which aiohttp lacks."""

from __future__ import annotations

import asyncio
from typing import cast

from aiohttp import MultipartReader, web
from aiohttp.streams import StreamReader

MAX_LINES = 256
"""Most lines between the data of two parts: boundaries, a part's headers (128 at most), and a preamble."""

MAX_LINE = 8190
"""Most bytes of a line outside of a part's data: aiohttp's limit for headers."""


class _PacedStream:
    """A body's stream that yields to the event loop at every read, and bounds the lines between parts."""

    def __init__(self, content: StreamReader) -> None:
        self._content = content
        self._lines = 0

    async def readline(self, *, max_line_length: int | None = None) -> bytes:
        """Raises `LineTooLong`, and ValueError after `MAX_LINES` lines without data of a part."""
        self._lines += 1
        if self._lines > MAX_LINES:
            raise ValueError("too many lines between parts")
        await asyncio.sleep(0)
        return await self._content.readline(max_line_length=max_line_length or MAX_LINE)

    async def read(self, n: int = -1) -> bytes:
        self._lines = 0
        await asyncio.sleep(0)
        return await self._content.read(n)

    def unread_data(self, data: bytes) -> None:
        self._content.unread_data(data)

    def at_eof(self) -> bool:
        return self._content.at_eof()


def multipart_reader(request: web.Request) -> MultipartReader:
    """Return aiohttp's multipart reader for the body. Reading from it raises ValueError for too many lines between
    parts."""
    return MultipartReader(request.headers, cast(StreamReader, _PacedStream(request.content)))
