"""Base of the tool-call parsers: the text buffer, and the call being read."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable

from coserve.api.answers.call_reader import CallReader, Reader
from coserve.api.answers.deltas import AnswerDelta, Collector, held_back
from coserve.api.answers.typed_arguments import Schemas

MAX_HEAD = 512
"""Most characters between a call's marker and its arguments."""


class ToolParser(ABC):
    """Parses the text of one choice, incrementally: joined deltas do not depend on where the text was cut. Text that is
    no call, malformed calls included, is content. `schemas`: JSON schemas of the request's tools."""

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._collector = Collector()
        self._buffer = ""
        self._call: Reader | None = None
        self._before = ""
        """Marker before the call. It is content if what follows is no call."""

    def push(self, text: str, /) -> AnswerDelta:
        self._buffer += text
        while self._buffer and self._step():
            pass
        return self._collector.take()

    def flush(self) -> AnswerDelta:
        """Return what was held back; the text has ended."""
        if self._call is not None:
            self._end_call(self._call)
        self._collector.add_content(self._rest())
        return self._collector.end()

    @abstractmethod
    def _search(self) -> bool:
        """Parse a part of the buffer outside of calls; return whether more of it can be parsed."""

    @abstractmethod
    def _ended(self, named: bool) -> None:
        """Called at the end of a call; `named` false: the text was no call."""

    def _rest(self) -> str:
        """Return the content that the buffer holds when the text has ended."""
        return self._buffer

    def _begin_call(self, before: str, rest: str, name: str | None = None) -> None:
        """Begin a call. `before`: the marker that was read; `rest`: the text after it; `name`: see `CallReader`."""
        self._before, self._buffer = before, rest
        self._call = self._reader() if name is None else CallReader(self._collector, name)

    def _begin_headed(self, match: Callable[[str, int, int], re.Match[str] | None], marker: str) -> bool:
        """Begin a call with a head before its arguments. `match` matches the head, whose group 1 is the call's name;
        what is no head is content, and so is the `marker` before it. Returns False if more text is needed to tell."""
        at = self._buffer.find("{", 0, MAX_HEAD)
        if at < 0 and len(self._buffer) < MAX_HEAD:
            return False
        found = None if at < 0 else match(self._buffer, 0, at)
        if found is None:
            self._collector.add_content(marker)
        else:
            self._begin_call("", self._buffer[at:], found[1])
        return True

    def _reader(self) -> Reader:
        return CallReader(self._collector)

    def _find(self, marker: str) -> bool:
        """Pass on the content before a marker, and the marker itself; return whether it was found."""
        before, found, after = self._buffer.partition(marker)
        held = 0 if found else held_back(before, marker)
        self._collector.add_content(before[: len(before) - held])
        self._buffer = after if found else before[len(before) - held :]
        return bool(found)

    def _marker(self, *markers: str) -> str | None:
        """Consume one of the markers, after white space, and return it; empty: the buffer begins with none; None: more
        text is needed to tell."""
        rest = self._buffer.lstrip()
        if any(marker.startswith(rest) and marker != rest for marker in markers):
            return None
        found = next((marker for marker in markers if rest.startswith(marker)), "")
        self._buffer = rest.removeprefix(found) if found else self._buffer
        return found

    def _step(self) -> bool:
        if self._call is None:
            return self._search()
        self._buffer = self._call.push(self._buffer)
        if self._call.ended:
            self._end_call(self._call)
        return True

    def _end_call(self, call: Reader) -> None:
        self._call = None
        self._ended(call.named)
        if not call.named:
            self._collector.add_content(self._before + call.text)
