"""Parses the text of a choice into reasoning, tool calls and content."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from coserve.api.answers.deltas import AnswerDelta
from coserve.api.answers.families import ToolFamily, long_id
from coserve.api.answers.reasoning import CLOSE, OPEN, ReasoningParser
from coserve.api.answers.tool_parser import ToolParser
from coserve.api.answers.typed_arguments import Schemas
from coserve.core.grammar import CallStart
from coserve.core.schemas import GenerateRequest
from coserve.data.pretrained.tokenizer import Tokenizer

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
