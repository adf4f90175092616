"""Tool calls as Mistral's models write them: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or, in newer
ones, `[TOOL_CALLS]name[ARGS]{...}` for each call."""

from __future__ import annotations

import re
from typing import Literal

from coserve.api.answers.tool_parser import ToolParser

MARKER = "[TOOL_CALLS]"
_NAME = re.compile(r"\s*([\w.-]{1,256})\s*(\[CALL_ID\][^\[{]*)?(\[ARGS\])?\s*")
"""Text between the marker and the arguments, in the newer form."""


class MistralParser(ToolParser):
    """Calls may appear anywhere in the text."""

    _expected: Literal["content", "calls", "more"] = "content"
    """State of the parser. `calls`: after the marker; `more`: after a call of a list."""
    _listed = False

    def _search(self) -> bool:
        match self._expected:
            case "content":
                found = self._find(MARKER)
                self._expected = "calls" if found else "content"
                return found
            case "calls":
                return self._first_call()
            case "more":
                return self._next_call()

    def _first_call(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest:
            return False
        if rest.startswith("["):
            self._begin_listed(MARKER, len(self._buffer) - len(rest) + 1)
            return True
        if not self._begin_headed(_NAME.fullmatch, MARKER):
            return False
        self._expected, self._listed = "content", False
        return True

    def _next_call(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest:
            return False
        if rest.startswith(","):
            self._begin_listed("", len(self._buffer) - len(rest) + 1)
        else:
            self._expected, self._buffer = "content", rest.removeprefix("]")
        return True

    def _begin_listed(self, marker: str, length: int) -> None:
        """Begin a call of a list, after `length` characters of the buffer."""
        self._listed = True
        self._begin_call(marker + self._buffer[:length], self._buffer[length:])

    def _ended(self, named: bool) -> None:
        self._expected = "more" if named and self._listed else "content"

    def _rest(self) -> str:
        return (MARKER if self._expected == "calls" else "") + self._buffer
