"""Tool calls as DeepSeek's models write them, V3.1: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`;
V3 and R1 write `function<｜tool▁sep｜>name`, then the arguments in a Markdown code block."""

from __future__ import annotations

import re
from typing import Literal

from coserve.api.answers.tool_parser import ToolParser

OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
"""Around all calls of an answer."""
BEGIN, END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_HEAD = re.compile(r"\s*(?:function<｜tool▁sep｜>)?([\w.-]{1,256})\s*(?:<｜tool▁sep｜>)?\s*(?:```json)?\s*")
"""Text between `BEGIN` and the arguments."""


class DeepSeekParser(ToolParser):
    """Calls may appear anywhere in the text."""

    _expected: Literal["content", "first", "head", "more"] = "content"
    """State of the parser. `first`: after `OPEN`; `head`: after `BEGIN`; `more`: after a call."""

    def _search(self) -> bool:
        match self._expected:
            case "content":
                found = self._find(OPEN)
                self._expected = "first" if found else "content"
                return found
            case "head":
                begun = self._begin_headed(_HEAD.fullmatch, BEGIN)
                self._expected = "content" if begun else "head"
                return begun
            case "first":
                marker = self._marker(BEGIN)
            case "more":
                marker = self._marker("```", END, BEGIN, CLOSE)
        if marker is None:
            return False
        if marker == BEGIN:
            self._expected = "head"
        elif marker not in ("```", END):
            self._collector.add_content(OPEN if self._expected == "first" else "")
            self._expected = "content"
        return True

    def _ended(self, named: bool) -> None:
        self._expected = "more"

    def _rest(self) -> str:
        if self._expected == "more":
            return ""
        return {"first": OPEN, "head": BEGIN}.get(self._expected, "") + self._buffer
