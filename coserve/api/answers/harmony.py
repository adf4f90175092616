"""Answers as gpt-oss' models write them, in OpenAI's harmony format: messages with a channel, each
`<|start|>assistant<|channel|>NAME<|message|>TEXT<|end|>`; the prompt ends with the start of the first one."""

from __future__ import annotations

import re
from typing import Literal

from coserve.api.answers.deltas import AnswerDelta, held_back
from coserve.api.answers.tool_parser import ToolParser

Kind = Literal["reasoning", "content", "call"]
MESSAGE, CHANNEL, START = "<|message|>", "<|channel|>", "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_END = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|(?:start|channel)\|>)")
_TO = re.compile(r"\bto=(functions\.)?([^\s<]{1,256})")
_MAX_HEADER = 1024


class HarmonyParser(ToolParser):
    """Messages to functions are calls, if the request has tools; messages to others, and channel `analysis`, are
    reasoning; all else is content, and so is text outside of messages. Messages of one kind are joined by a line
    break."""

    _reasoning = ""
    _kind: Kind | None = None
    """Kind of the message that is read; None: a header is expected."""
    _empty = True
    """Whether the message has no text yet."""
    _seen: tuple[Kind | None, ...] = ()
    """Kinds of earlier messages."""

    def push(self, text: str, /) -> AnswerDelta:
        return self._with_reasoning(super().push(text))

    def flush(self) -> AnswerDelta:
        header = self._kind is None and self._buffer.lstrip().startswith((START, CHANNEL))
        rest, self._buffer = "" if header else self._buffer, ""
        if self._kind is None and rest:
            self._begin("content")
        self._add(rest)
        self._end()
        return self._with_reasoning(super().flush())

    def _with_reasoning(self, found: AnswerDelta) -> AnswerDelta:
        reasoning, self._reasoning = self._reasoning, ""
        return AnswerDelta(found.content, reasoning, found.calls)

    def _search(self) -> bool:
        if self._kind is None:
            return self._header()
        end = _END.search(self._buffer)
        held = 0 if end else max(held_back(self._buffer, marker) for marker in (*_ENDS, START, CHANNEL))
        self._add(self._buffer[: end.start() if end else len(self._buffer) - held])
        self._buffer = self._buffer[end.end() if end else len(self._buffer) - held :]
        if end:
            self._end()
        return end is not None

    def _header(self) -> bool:
        rest = self._buffer.lstrip()
        begins = (START, CHANNEL) if self._seen else (START, CHANNEL, "to=")
        header, found, after = rest.partition(MESSAGE)
        long = len(header) > _MAX_HEADER + (0 if found else len(MESSAGE))
        if long or not any(rest.startswith(begin) or begin.startswith(rest) for begin in begins):
            self._begin("content")
            return True
        if found:
            self._buffer = after
            to, channel = _TO.search(header), header.partition(CHANNEL)[2].lstrip()
            if to is not None and to[1]:
                self._begin("call" if self._schemas else "content", to[2])
            else:
                self._begin("reasoning" if to is not None or channel.startswith("analysis") else "content")
        return bool(found)

    def _begin(self, kind: Kind, name: str = "") -> None:
        self._kind, self._empty = kind, True
        if kind == "call":
            self._collector.begin_call(name)
        elif kind in self._seen:
            self._add("\n")

    def _add(self, text: str) -> None:
        self._empty = self._empty and not text.strip()
        if self._kind == "reasoning":
            self._reasoning += text
        elif self._kind == "call":
            self._collector.add_arguments(text)
        else:
            self._collector.add_content(text)

    def _end(self) -> None:
        if self._kind == "call" and self._empty:
            self._collector.add_arguments("{}")
        self._seen, self._kind = (*self._seen, self._kind), None

    def _ended(self, named: bool) -> None:
        pass
