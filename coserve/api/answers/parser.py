"""Parses the text of a choice into reasoning, tool calls and content."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from coserve.api.answers.deltas import AnswerDelta, held_back
from coserve.api.answers.families import ToolFamily, long_id
from coserve.api.answers.tool_parser import ToolParser
from coserve.api.answers.typed_arguments import Schemas
from coserve.core.grammar import CallStart
from coserve.core.schemas.generation import GenerateRequest
from coserve.data.pretrained.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"
"""Around the reasoning, which models write before the answer."""
PIECE = 4096
"""Characters parsed at once: a few milliseconds."""
_END = 16
"""Tokens at the prompt's end in which `<think>` is searched."""


@dataclass(frozen=True)
class AnswerFormat:
    """How the answers to one request are parsed. `family`: form of tool calls; None: they stay in the content.
    `thinks`: whether the chat template has reasoning between tags. `parallel`: false: only the first call is kept.
    `shows_reasoning`: false: reasoning is dropped. `schemas`: JSON schemas of the tools that may be called. `calls`: if
    there are any, only an answer that begins with one of them has calls; any other is content."""

    family: ToolFamily | None
    thinks: bool
    parallel: bool = True
    shows_reasoning: bool = True
    schemas: Schemas = field(default_factory=dict)
    calls: tuple[CallStart, ...] = ()

    def prepared(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request, changed so that its answers contain the markers to parse."""
        if self.family is None or not self.family.special:
            return request
        return msgspec.structs.replace(request, skip_special_tokens=False)


class AnswerParsers:
    """The parsers of one request's choices. The prompt says whether answers begin inside of reasoning."""

    def __init__(self, format: AnswerFormat, tokenizer: Tokenizer) -> None:
        self.format = format
        self.new_id = long_id if format.family is None else format.family.new_id
        self._tokenizer = tokenizer
        self._inside = False

    def read_prompt(self, prompt: Sequence[int]) -> None:
        """Read the prompt's token ids, before any parser is made."""
        end = self._tokenizer.decode(prompt[-_END:], skip_special=False)
        self._inside = self.format.thinks and end.rstrip().endswith(OPEN)

    def new(self) -> AnswerParser:
        return AnswerParser(self.format, inside=self._inside)

    async def parse(self, text: str) -> AnswerDelta:
        """Parse the whole text of a choice, without holding the event loop."""
        parser, deltas = self.new(), []
        for start in range(0, len(text), PIECE):
            deltas.append(parser.push(text[start : start + PIECE]))
            await asyncio.sleep(0)
        return AnswerDelta.joined([*deltas, parser.flush()])


class CallsOrText:
    """Passes an answer to `parser` if it begins like a call. Any other is content, whatever it contains."""

    def __init__(self, parser: ToolParser, calls: Iterable[CallStart]) -> None:
        self._parser, self._starts = parser, tuple("".join(call) for call in calls)
        self._held = ""
        self._has_calls: bool | None = None
        """None: too little of the answer is known."""

    def push(self, text: str) -> AnswerDelta:
        if self._has_calls is None:
            text = self._held = self._held + text
            if any(start.startswith(text) and start != text for start in self._starts):
                return AnswerDelta()
            self._has_calls = text.startswith(self._starts)
        return self._parser.push(text) if self._has_calls else AnswerDelta(text)

    def flush(self) -> AnswerDelta:
        if self._has_calls is None:
            return AnswerDelta(self._held)
        return self._parser.flush()


class ReasoningParser:
    """Separates the reasoning of one choice, incrementally. Line breaks around it are dropped. `inside`: the prompt
    ends with `<think>`."""

    def __init__(self, *, inside: bool) -> None:
        self._inside = inside
        self._buffer = ""
        self._part: Literal["start", "opened", "reasoning", "closed", "answer"] = "start"

    def push(self, text: str) -> tuple[str, str]:
        """Return what the text adds to the reasoning, and to the answer."""
        self._buffer += text
        reasoning = ""
        if self._part == "start":
            self._start()
        if self._part == "opened":
            self._buffer = self._buffer.lstrip("\n")
            self._part = "reasoning" if self._buffer else "opened"
        if self._part == "reasoning":
            reasoning = self._reasoning()
        if self._part == "closed":
            self._buffer = self._buffer.lstrip("\n")
            self._part = "answer" if self._buffer else "closed"
        if self._part != "answer":
            return reasoning, ""
        answer, self._buffer = self._buffer, ""
        return reasoning, answer

    def flush(self) -> tuple[str, str]:
        """Return what was held back; the text has ended."""
        rest = self._buffer
        if self._part == "start" and not self._inside:
            return "", rest
        return ("" if self._part == "closed" else rest.rstrip("\n")), ""

    def _start(self) -> None:
        rest = self._buffer.lstrip()
        if rest.startswith(OPEN):
            self._part, self._buffer = "opened", rest.removeprefix(OPEN)
        elif not OPEN.startswith(rest):
            self._part = "opened" if self._inside else "answer"

    def _reasoning(self) -> str:
        before, found, after = self._buffer.partition(CLOSE)
        if found:
            self._part, self._buffer = "closed", after
            return before.rstrip("\n")
        kept = before[: len(before) - held_back(before, CLOSE)].rstrip("\n")
        self._buffer = before[len(kept) :]
        return kept


class AnswerParser:
    """Parses one choice, incrementally. `inside`: the prompt ends with `<think>`."""

    def __init__(self, format: AnswerFormat, *, inside: bool) -> None:
        self._reasoning = ReasoningParser(inside=inside) if format.thinks else None
        self._tools: ToolParser | CallsOrText | None = None
        if format.family is not None:
            tools = format.family.parser(format.schemas)
            self._tools = CallsOrText(tools, format.calls) if format.calls else tools
        self._format = format
        self.calls = 0
        """Number of calls so far."""

    def push(self, text: str) -> AnswerDelta:
        reasoning, answer = ("", text) if self._reasoning is None else self._reasoning.push(text)
        return self._delta(reasoning, AnswerDelta(answer) if self._tools is None else self._tools.push(answer))

    def flush(self) -> AnswerDelta:
        """Return what was held back; the text has ended."""
        reasoning, answer = ("", "") if self._reasoning is None else self._reasoning.flush()
        if self._tools is None:
            return self._delta(reasoning, AnswerDelta(answer))
        return self._delta(reasoning, AnswerDelta.joined([self._tools.push(answer), self._tools.flush()]))

    def _delta(self, reasoning: str, found: AnswerDelta) -> AnswerDelta:
        calls = [call for call in found.calls if self._format.parallel or call.index == 0]
        self.calls = max([self.calls, *(call.index + 1 for call in calls)])
        shown = reasoning + found.reasoning if self._format.shows_reasoning else ""
        return AnswerDelta(found.content, shown, calls)


def thinks(template: str | None) -> bool:
    return template is not None and CLOSE in template
