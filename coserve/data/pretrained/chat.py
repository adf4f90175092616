"""The base's chat template: turns messages into text, for generation and for training. No torch."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import NamedTuple

import jinja2
from jinja2 import Template, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro

from coserve.core.errors import InvalidRequest
from coserve.data.pretrained import sandbox

Message = Mapping[str, object]
Limits = Callable[[], AbstractContextManager[None]]
Span = tuple[int, int]
"""Character range `start` to `end` (exclusive) of a rendered chat."""
_Render = Callable[[Sequence[Message], bool], tuple[str, list[Span]]]

_END = "\N{SYMBOL FOR END OF TEXT}coserve"
"""Mark put at the end of a message that is to be continued."""
_END_OF_THOUGHT = "</think>"
"""End of the reasoning in a message. Templates rewrite the text before it in their own way."""
_SPLIT = (
    'it changes earlier answers; give all but the last answer "weight": 0, or set training.one_row_per_answer, which '
    "makes a row of each"
)
_OTHER_TARGETS = 'give prompt and answer as texts, or, without a preference loss, set training.train_on to "all"'
THINKING = ("enable_thinking", "thinking")
"""Variables by which clients turn thinking off for any model."""
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    SyntaxError,
    RecursionError,
)


class _GenerationBlocks(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks the assistant's text, as in transformers."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("mark", [nodes.ContextReference()])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def mark(self, context: Context, caller: Macro) -> str:
        text = str(caller())
        context["coserve_marks"].add(text)
        return text


class _Marks:
    """Rendered `{% generation %}` blocks: each block's text, and the length of the text before it."""

    def __init__(self) -> None:
        self.length = 0
        self.spans: list[tuple[int, str]] = []

    def add(self, text: str) -> None:
        self.spans.append((self.length, text))


class TrainingText(NamedTuple):
    """A chat as text, and its spans to learn, in order: one of each message, unless the template has other than one
    block in it. `marked`: the spans come from the template's `{% generation %}` blocks."""

    text: str
    spans: list[Span]
    marked: bool


class ChatTemplate:
    """A base's chat template, with the special tokens that it may use (`bos_token`, `eos_token`, ...)."""

    def __init__(
        self, source: str, tokens: Mapping[str, str], added: Collection[str] = (), limits: Limits = nullcontext
    ) -> None:
        """`added`: all added tokens of the vocabulary, one of which ends a turn. `limits`: context in which the
        template is compiled and rendered."""
        self._source, self._tokens, self._limits = source, dict(tokens), limits
        known = sorted({token for token in (*tokens.values(), *added) if token.strip()}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, known)) or "(?!)")
        self._longest = max(map(len, known), default=0)

    @cached_property
    def _compiled(self) -> tuple[Template, frozenset[str]]:
        """Compile the template; return it and the variables that it reads."""
        return sandbox.SandboxedEnvironment([_GenerationBlocks]).compile_template(self._source)

    def check(self) -> None:
        """Raise `jinja2.TemplateError` for a template that does not compile, or reads no messages."""
        if "messages" not in self._compiled[1]:
            raise jinja2.TemplateError("expected a template that writes `messages`, got one that does not read them")

    @cached_property
    def end_of_turn(self) -> str | None:
        """Return the first added token after the assistant's answer to one question. None: the template writes none
        there, or refuses the chat."""
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _END}]
        try:
            text, _ = self._render(chat, False)
        except InvalidRequest:
            return None
        answer = text.rfind(_END)
        found = None if answer < 0 else self._special.search(text, answer + len(_END))
        return None if found is None else found.group()

    def last_special(self, text: str, span: Span) -> Span | None:
        """Return the added token at the end of the span, ignoring white space; None if the span ends otherwise."""
        start, end = span
        end = start + len(text[start:end].rstrip())
        return next((match.span() for match in self._special.finditer(text, start, end) if match.end() == end), None)

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Message] = (),
        options: Mapping[str, object] | None = None,
    ) -> tuple[str, list[Span]]:
        marks, parts = _Marks(), []
        values: dict[str, object] = {
            **self._tokens,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": [dict(tool) for tool in tools] or None,
            "coserve_marks": marks,
        }
        given = {"documents": None} | dict(options or {})
        try:
            with self._limits():
                template, variables = self._compiled
                known = {each for each in variables - values.keys() if not each.endswith("_token")}
                for name, value in (options or {}).items():
                    if name not in THINKING or value is not False:  # a template that does not read it never thinks
                        _check_option(name, known)
                for part in sandbox.render(template, given | values):
                    parts.append(part)
                    marks.length += len(part)
        except sandbox.LimitExceeded as error:
            raise InvalidRequest(f"the base's chat template exceeds its limits: {error}", field="messages") from error
        except _TEMPLATE_FAULTS as error:
            detail = str(error)[:500] if isinstance(error, jinja2.TemplateError) else type(error).__name__
            detail = detail.encode(errors="replace").decode()
            raise InvalidRequest(
                f"the base's chat template refuses the messages: {detail}", field="messages"
            ) from error
        text = "".join(parts)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                "the base's chat template writes half of a surrogate pair, which is no text", field="messages"
            ) from error
        spans = [(start, start + len(part)) for start, part in marks.spans]
        if any(text[start:end] != part for (start, end), (_, part) in zip(spans, marks.spans, strict=True)):
            spans = []  # a mark inside a captured block has no known position
        return text, spans

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        tools: Sequence[Message] = (),
        options: Mapping[str, object] | None = None,
    ) -> str:
        """Render the chat as text. `continue_final`: the last message is left open for the model to continue. `tools`:
        their JSON schemas, for templates that show them; `options`: further variables that the template reads.

        Raises `InvalidRequest` if the template refuses the messages or exceeds the sandbox's limits.
        """
        if not messages:
            raise InvalidRequest("expected at least one message", field="messages")
        if not continue_final:
            return self._render(messages, add_generation_prompt, tools, options)[0]
        content = str(messages[-1].get("content", ""))
        last = {**messages[-1], "content": content + _END}
        text, _ = self._render([*messages[:-1], last], False, tools, options)
        if text.count(_END) != 1:
            raise InvalidRequest("the base's chat template cannot continue a message", field="messages")
        text = text[: text.index(_END)]
        return text if text.endswith(content) else text.rstrip()

    def render_for_training(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        learned: Sequence[int] | None = None,
        options: Mapping[str, object] | None = None,
        kept: Callable[[str], int] = len,
    ) -> TrainingText:
        """Render the chat, and return the span to learn of each message in `learned` (None: all of the assistant's):
        its content and its end-of-turn token. `tools` and `options`: as in `render`. `kept`: the number of the text's
        characters that are used. Without blocks, messages behind them have no span: each costs a rendering of the
        chat up to it.

        The spans are the template's `{% generation %}` blocks, however many a message has, as in transformers'
        `return_assistant_tokens_mask`, with one difference: an end of turn that directly follows a block is added to
        its span. In a template without blocks, a span is what the message adds to the chat before it rendered with a
        generation prompt. Raises `InvalidRequest` if the template changes such a message, or the text before it, when
        more messages follow: the loss would be on the wrong tokens, unnoticed.
        """
        render = partial(self._render, tools=tools, options=options)
        text, marks = render(messages, False)
        assistant = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        learned = assistant if learned is None else list(learned)
        if marks and learned == assistant:
            return TrainingText(text, [self._with_end_of_turn(text, mark) for mark in marks], marked=True)
        end, found, lost = kept(text), list[Span](), None
        for i in learned:
            if (span := self._added_by(messages, i, text, render)) is None:
                lost = i
                break
            found.append(span)
            if span[1] > end:
                break
        if lost is None and marks:
            if found and learned[len(found) - 1] + 1 == len(messages):
                found[-1] = found[-1][0], len(text)  # a mark may be behind the last turn, as in TRL's for Phi-3
            starts = [start for start, _ in found]
            inside = [mark for mark in marks if (at := bisect_left(starts, mark[1])) and mark[0] < found[at - 1][1]]
            return TrainingText(text, [self._with_end_of_turn(text, mark) for mark in inside], marked=True)
        if marks and len(marks) == len(assistant):  # a block of each, as far as one can tell
            mark_of = dict(zip(assistant, marks, strict=True))
            return TrainingText(text, [self._with_end_of_turn(text, mark_of[i]) for i in learned], marked=True)
        if lost is None:
            return TrainingText(text, found, marked=False)
        advice = _OTHER_TARGETS if self._added_by(messages[: lost + 1], lost, None, render) is None else _SPLIT
        raise InvalidRequest(
            "cannot tell what the assistant wrote in what the base's chat template, which has no {% generation %} "
            "blocks, makes of these "
            f"messages: {advice}",
            field="messages",
        )

    def _added_by(self, messages: Sequence[Message], index: int, text: str | None, render: _Render) -> Span | None:
        """Return the span of `text` that message `index` adds to the chat before it; None if it cannot be determined.
        `text`: the rendered messages; None: not rendered yet."""
        last = index + 1 == len(messages)
        try:
            prompt = render(messages[:index], True)[0]
            turn = text if last and text is not None else render(messages[: index + 1], False)[0]
        except InvalidRequest:
            return None  # the template accepts only whole conversations
        text = turn if text is None else text
        bare = turn.removesuffix(self._end_of_chat(messages[:index], prompt, render))
        content = str(messages[index].get("content") or "").rpartition(_END_OF_THOUGHT)[2].strip()
        if not (bare.startswith(prompt) and text.startswith(bare) and content in bare[len(prompt) :]):
            return None
        closed = self._closed(bare, len(prompt))
        if closed is None and last:  # the end of the chat may also be the end of the turn
            bare, closed = turn, self._closed(turn, len(prompt))
        return len(prompt), len(bare) if closed is None else closed

    def _end_of_chat(self, messages: Sequence[Message], prompt: str, render: _Render) -> str:
        """Return what the template writes after the last message of a chat without a generation prompt: EOS in Phi-3's,
        mostly nothing. `prompt`: the messages rendered with the generation prompt."""
        try:
            ended = render(messages, False)[0]
        except InvalidRequest:
            return ""
        if prompt.startswith(ended):  # as in most templates
            return ""
        start = bisect_left(range(len(ended)), True, key=lambda at: not prompt.startswith(ended[: at + 1]))
        first = max(0, start - self._longest)
        inside = (at for at in range(first, start) if (found := self._special.match(ended, at)) and start < found.end())
        return ended[next(inside, start) :]

    def _closed(self, turn: str, start: int) -> int | None:
        """Return the end of the turn's last special token, if only white space follows it."""
        ends = [match.end() for match in self._special.finditer(turn, start)]
        return ends[-1] if ends and not turn[ends[-1] :].strip() else None

    def _with_end_of_turn(self, text: str, span: Span) -> Span:
        """Return `span` with the end of turn that follows it, unless the span already ends with an added token."""
        start, end = span
        follows = self.end_of_turn is not None and text.startswith(self.end_of_turn, end)
        if not follows or self.end_of_turn is None or self.last_special(text, span) is not None:
            return span
        return start, end + len(self.end_of_turn)


def _check_option(name: str, known: Collection[str]) -> None:
    """Raise `InvalidRequest` for a variable that the template does not read, or that coserve sets itself."""
    if name not in known:
        names = ", ".join(sorted(known)[:20]) or "none"
        raise InvalidRequest(
            f"expected a variable that the base's chat template reads ({names}), got {name!r}",
            field="chat_template_kwargs",
        )


def choose_template(found: object) -> str | None:
    """Return the default template in `tokenizer_config.json`'s `chat_template`, which is a text or a list of named
    ones."""
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


LOST_CALLS = (
    "the base's chat template leaves tool_calls out, so that an empty turn would be learned; give the message its "
    "calls as "
    '"content", or "weight": 0'
)


LOST_REASONING = (
    "the base's chat template leaves reasoning_content out, so that it would not be learned; put it into content, as "
    "the model is to write it"
)


def only_calls(message: Message) -> bool:
    """Return whether the message calls tools and has no text."""
    return isinstance(message.get("tool_calls"), list) and not message.get("content")


def refuse_lost_parts(message: Message, rendered: str) -> None:
    """Raise `InvalidRequest` if the template left out a part of `message`, which is to be learned: its reasoning, or
    its tool calls if there is no text, so that an empty turn would be learned."""
    reasoning, calls = message.get("reasoning_content"), message.get("tool_calls")
    if isinstance(reasoning, str) and reasoning.strip() not in rendered:
        raise InvalidRequest(LOST_REASONING, field="messages")
    if not (only_calls(message) and isinstance(calls, list)):
        return
    if any(call["function"]["name"] not in rendered for call in calls):
        raise InvalidRequest(LOST_CALLS, field="messages")
