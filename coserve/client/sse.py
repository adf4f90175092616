"""Parses server-sent events from a stream of bytes, as in section 9.2.6 of the HTML standard."""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """A server-sent event. `id` is the last id in the stream so far, of this or an earlier event."""

    data: str
    event: str = "message"
    id: str | None = None


class EventParser:
    """Takes bytes in chunks of any size and yields an event at its blank line. Lines end in LF, CR LF or CR."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._line = ""
        self._after_cr = False
        self._data: list[str] = []
        self._event = ""
        self._id: str | None = None

    def feed(self, chunk: bytes) -> Iterator[Event]:
        text = self._decoder.decode(chunk)
        if not text:
            return
        second_half = self._after_cr and text.startswith("\n")  # the LF of a CR LF
        self._after_cr = text.endswith("\r")
        text = text[1:] if second_half else text
        *lines, self._line = (self._line + text.replace("\r\n", "\n").replace("\r", "\n")).split("\n")
        for line in lines:
            if (event := self._feed_line(line)) is not None:
                yield event

    def _feed_line(self, line: str) -> Event | None:
        if not line:
            data, name = self._data, self._event
            self._data, self._event = [], ""
            return Event("\n".join(data), name or "message", self._id) if data else None
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        elif name == "id" and "\0" not in value:
            self._id = value
        return None  # comments (an empty name) and unknown fields are ignored


async def events(body: AsyncIterable[bytes]) -> AsyncIterator[Event]:
    """Yield the events of a body as they arrive."""
    parser = EventParser()
    async for chunk in body:
        for event in parser.feed(chunk):
            yield event
