"""Tool calls as Qwen's and Hermes' models write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from coserve.api.answers.call_reader import CallReader
from coserve.api.answers.deltas import AnswerDelta, Collector, held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """A `ToolParser`. Calls may stand anywhere; a missing `</tool_call>` is forgiven."""

    def __init__(self) -> None:
        self._collector = Collector()
        self._buffer = ""
        self._call: CallReader | None = None
        self._closing = False
        """Whether `</tool_call>` is expected."""

    def push(self, text: str) -> AnswerDelta:
        self._buffer += text
        while self._buffer and self._step():
            pass
        return self._collector.take()

    def flush(self) -> AnswerDelta:
        if self._call is not None:
            self._end_call(self._call)
        if not self._closing:
            self._collector.add_content(self._buffer)
        return self._collector.end()

    def _step(self) -> bool:
        """Parse a part of the buffer; return whether more of it can be parsed."""
        if self._call is not None:
            self._buffer = self._call.push(self._buffer)
            if self._call.ended:
                self._end_call(self._call)
            return True
        if self._closing:
            rest = self._buffer.lstrip()
            if rest != CLOSE and CLOSE.startswith(rest):
                return False
            self._buffer = rest.removeprefix(CLOSE) if rest.startswith(CLOSE) else self._buffer
            self._closing = False
            return True
        before, found, after = self._buffer.partition(OPEN)
        if found:
            self._call = CallReader(self._collector)
            self._buffer = after
        else:
            held = held_back(before, OPEN)
            before, self._buffer = before[: len(before) - held], before[len(before) - held :]
        self._collector.add_content(before)
        return bool(found)

    def _end_call(self, call: CallReader) -> None:
        """A malformed call, or the beginning of one, is content."""
        self._call, self._closing = None, call.named
        if not call.named:
            self._collector.add_content(OPEN + call.text)
