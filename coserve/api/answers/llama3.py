"""Tool calls as Llama 3's models write them: nothing but `{"name": ..., "parameters": {...}}`, several with `;`."""

from __future__ import annotations

from coserve.api.answers.tool_parser import ToolParser

MARKER = "<|python_tag|>"
"""Special token that may stand before a call, in answers with special tokens."""


class Llama3Parser(ToolParser):
    """Calls are found only at the beginning of an answer; from the first other text on, all is content."""

    _content_only = False

    def _search(self) -> bool:
        if not self._content_only:
            rest = self._buffer.lstrip(" \t\r\n;")
            if MARKER.startswith(rest) and rest != MARKER:
                return False
            rest = rest.removeprefix(MARKER).lstrip()
            if not rest:
                return False
            if rest.startswith("{"):
                self._begin_call(self._buffer[: len(self._buffer) - len(rest)], rest)
                return True
            self._content_only = True
        self._collector.add_content(self._buffer)
        self._buffer = ""
        return False

    def _ended(self, named: bool) -> None:
        self._content_only = not named
