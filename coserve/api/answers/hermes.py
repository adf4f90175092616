"""Tool calls as Qwen's and Hermes' models write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from coserve.api.answers.tool_parser import ToolParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Calls may appear anywhere in the text; a missing `</tool_call>` is forgiven."""

    _closing = False
    """Whether `</tool_call>` is expected."""

    def _search(self) -> bool:
        if self._closing:
            self._closing = self._marker(CLOSE) is None
            return not self._closing
        found = self._find(OPEN)
        if found:
            self._begin_call(OPEN, self._buffer)
        return found

    def _ended(self, named: bool) -> None:
        self._closing = named

    def _rest(self) -> str:
        return "" if self._closing else self._buffer
