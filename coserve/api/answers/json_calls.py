"""Tool calls whose arguments are JSON, as families of models write them."""

from __future__ import annotations

import re
from typing import Literal

from coserve.api.answers.tool_parser import ToolParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Calls as Qwen's and Hermes' models write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`,
    anywhere in the text; a missing `</tool_call>` is forgiven."""

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


PYTHON_TAG = "<|python_tag|>"
"""Special token that may stand before a call, in answers with special tokens."""


class Llama3Parser(ToolParser):
    """Calls as Llama 3's models write them: nothing but `{"name": ..., "parameters": {...}}`, several with `;`. They
    are found only at the beginning of an answer; from the first other text on, all is content."""

    _content_only = False

    def _search(self) -> bool:
        if not self._content_only:
            rest = self._buffer.lstrip(" \t\r\n;")
            if PYTHON_TAG.startswith(rest) and rest != PYTHON_TAG:
                return False
            rest = rest.removeprefix(PYTHON_TAG).lstrip()
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


TOOL_CALLS = "[TOOL_CALLS]"
_MISTRAL_HEAD = re.compile(r"\s*([\w.-]{1,256})\s*(\[CALL_ID\][^\[{]*)?(\[ARGS\])?\s*")
"""Text between the marker and the arguments, in the newer form."""


class MistralParser(ToolParser):
    """Calls as Mistral's models write them: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or, in newer ones,
    `[TOOL_CALLS]name[ARGS]{...}` for each call; anywhere in the text."""

    _expected: Literal["content", "calls", "more"] = "content"
    """State of the parser. `calls`: after the marker; `more`: after a call of a list."""
    _listed = False

    def _search(self) -> bool:
        match self._expected:
            case "content":
                found = self._find(TOOL_CALLS)
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
            self._begin_listed(TOOL_CALLS, len(self._buffer) - len(rest) + 1)
            return True
        if not self._begin_headed(_MISTRAL_HEAD.fullmatch, TOOL_CALLS):
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
        return (TOOL_CALLS if self._expected == "calls" else "") + self._buffer


CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
"""Around all calls of an answer."""
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_HEAD = re.compile(r"\s*(?:function<｜tool▁sep｜>)?([\w.-]{1,256})\s*(?:<｜tool▁sep｜>)?\s*(?:```json)?\s*")
"""Text between `CALL_BEGIN` and the arguments."""


class DeepSeekParser(ToolParser):
    """Calls as DeepSeek's models write them, V3.1: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`;
    V3 and R1 write `function<｜tool▁sep｜>name`, then the arguments in a Markdown code block. Calls may appear anywhere
    in the text."""

    _expected: Literal["content", "first", "head", "more"] = "content"
    """State of the parser. `first`: after `CALLS_BEGIN`; `head`: after `CALL_BEGIN`; `more`: after a call."""

    def _search(self) -> bool:
        match self._expected:
            case "content":
                found = self._find(CALLS_BEGIN)
                self._expected = "first" if found else "content"
                return found
            case "head":
                begun = self._begin_headed(_DEEPSEEK_HEAD.fullmatch, CALL_BEGIN)
                self._expected = "content" if begun else "head"
                return begun
            case "first":
                marker = self._marker(CALL_BEGIN)
            case "more":
                marker = self._marker("```", CALL_END, CALL_BEGIN, CALLS_END)
        if marker is None:
            return False
        if marker == CALL_BEGIN:
            self._expected = "head"
        elif marker not in ("```", CALL_END):
            self._collector.add_content(CALLS_BEGIN if self._expected == "first" else "")
            self._expected = "content"
        return True

    def _ended(self, named: bool) -> None:
        self._expected = "more"

    def _rest(self) -> str:
        if self._expected == "more":
            return ""
        return {"first": CALLS_BEGIN, "head": CALL_BEGIN}.get(self._expected, "") + self._buffer
