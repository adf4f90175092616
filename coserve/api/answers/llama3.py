"""Tool calls as Llama 3's models write them: nothing but `{"name": ..., "parameters": {...}}`, several with `;`."""

from __future__ import annotations

from coserve.api.answers.call_reader import CallReader
from coserve.api.answers.deltas import AnswerDelta, Collector

MARKER = "<|python_tag|>"
"""Special token that may stand before a call, in answers with special tokens."""


class Llama3Parser:
    """A `ToolParser`. An answer has calls only where it begins with one."""

    def __init__(self) -> None:
        self._collector = Collector()
        self._buffer = ""
        self._call: CallReader | None = None
        self._before = ""
        """Text before the call."""
        self._content_only = False

    def push(self, text: str) -> AnswerDelta:
        self._buffer += text
        while self._buffer and self._step():
            pass
        return self._collector.take()

    def flush(self) -> AnswerDelta:
        if self._call is not None:
            self._end_call(self._call)
        self._collector.add_content(self._buffer)
        return self._collector.end()

    def _step(self) -> bool:
        """Parse a part of the buffer; return whether more of it can be parsed."""
        if self._call is not None:
            self._buffer = self._call.push(self._buffer)
            if self._call.ended:
                self._end_call(self._call)
            return True
        if not self._content_only:
            rest = self._buffer.lstrip(" \t\r\n;")
            if MARKER.startswith(rest) and rest != MARKER:
                return False
            rest = rest.removeprefix(MARKER).lstrip()
            if not rest:
                return False
            if rest.startswith("{"):
                self._before, self._buffer = self._buffer[: len(self._buffer) - len(rest)], rest
                self._call = CallReader(self._collector)
                return True
            self._content_only = True
        self._collector.add_content(self._buffer)
        self._buffer = ""
        return False

    def _end_call(self, call: CallReader) -> None:
        """Anything else than a call is content, and so is all that follows."""
        self._call = None
        if not call.named:
            self._content_only = True
            self._collector.add_content(self._before + call.text)
