"""Tool calls as Mistral's models write them: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or, in newer
ones, `[TOOL_CALLS]name[ARGS]{...}` for each call."""

from __future__ import annotations

import re
from typing import Literal

from coserve.api.answers.call_reader import CallReader
from coserve.api.answers.deltas import AnswerDelta, Collector, held_back

MARKER = "[TOOL_CALLS]"
_NAME = re.compile(r"\s*([\w.-]{1,256})\s*(\[CALL_ID\][^\[{]*)?(\[ARGS\])?\s*")
"""Text between the marker and the arguments, in the newer form."""
_MAX_HEAD = 512
"""Characters of the longest such text."""


class MistralParser:
    """A `ToolParser`. Calls may stand anywhere."""

    def __init__(self) -> None:
        self._collector = Collector()
        self._buffer = ""
        self._call: CallReader | None = None
        self._before = ""
        """Text before the call, since the last one."""
        self._expected: Literal["content", "calls", "more"] = "content"
        """`calls`: a marker was read; `more`: a call of a list was read."""
        self._listed = False

    def push(self, text: str) -> AnswerDelta:
        self._buffer += text
        while self._buffer and self._step():
            pass
        return self._collector.take()

    def flush(self) -> AnswerDelta:
        if self._call is not None:
            self._end_call(self._call)
        before = MARKER if self._expected == "calls" else ""
        self._collector.add_content(before + self._buffer)
        return self._collector.end()

    def _step(self) -> bool:
        """Parse a part of the buffer; return whether more of it can be parsed."""
        if self._call is not None:
            self._buffer = self._call.push(self._buffer)
            if self._call.ended:
                self._end_call(self._call)
            return True
        match self._expected:
            case "content":
                return self._content()
            case "calls":
                return self._first_call()
            case "more":
                return self._next_call()

    def _content(self) -> bool:
        before, found, after = self._buffer.partition(MARKER)
        if found:
            self._expected, self._buffer = "calls", after
        else:
            held = held_back(before, MARKER)
            before, self._buffer = before[: len(before) - held], before[len(before) - held :]
        self._collector.add_content(before)
        return bool(found)

    def _first_call(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest:
            return False
        if rest.startswith("["):
            self._start_call(len(self._buffer) - len(rest) + 1, MARKER)
            return True
        at = self._buffer.find("{", 0, _MAX_HEAD)
        if at < 0 and len(self._buffer) < _MAX_HEAD:
            return False
        self._expected = "content"
        head = None if at < 0 else _NAME.fullmatch(self._buffer, 0, at)
        if head is None:
            self._collector.add_content(MARKER)
        else:
            self._call, self._listed = CallReader(self._collector, head[1]), False
            self._buffer = self._buffer[at:]
        return True

    def _next_call(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest:
            return False
        if rest.startswith(","):
            self._start_call(len(self._buffer) - len(rest) + 1, "")
        else:
            self._expected, self._buffer = "content", rest.removeprefix("]")
        return True

    def _start_call(self, length: int, marker: str) -> None:
        """Begin a call of a list, after `length` characters of the buffer."""
        self._before, self._buffer = marker + self._buffer[:length], self._buffer[length:]
        self._call, self._listed = CallReader(self._collector), True

    def _end_call(self, call: CallReader) -> None:
        """A malformed call, or the beginning of one, is content."""
        self._call = None
        self._expected = "more" if call.named and self._listed else "content"
        if not call.named:
            self._collector.add_content(self._before + call.text)
