"""Rows of a corpus in the formats that users send: text, prompt/completion, chat, alpaca, ShareGPT, preference. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal

import msgspec

from coserve.errors import MalformedRow
from coserve.types import Wire
from coserve.validation import explain


@dataclass(frozen=True)
class CorpusLimits:
    """Largest accepted corpus, in rows and in bytes of a row. `BatchPlan` has some bytes of memory for each row; nothing else grows."""

    rows: int = 10_000_000
    row_bytes: int = 16 << 20

    def check_line(self, line: int) -> None:
        """Raises `MalformedRow` if line `line` (from 1) is beyond the largest number of rows."""
        if line > self.rows:
            raise MalformedRow(f"expected a corpus of at most {self.rows} rows", line=line)


LIMITS = CorpusLimits()


@dataclass(frozen=True)
class TextRow:
    """Train on the whole text."""

    line: int
    text: str


@dataclass(frozen=True)
class CompletionRow:
    """Train on `completion`, given `prompt`."""

    line: int
    prompt: str
    completion: str


@dataclass(frozen=True)
class ChatRow:
    """Train on the assistant messages whose `weight` is not 0. The base's chat template renders the text, with `tools` if there are
    any."""

    line: int
    messages: tuple[dict[str, object], ...]
    tools: tuple[dict[str, object], ...] = ()


@dataclass(frozen=True)
class PreferenceRow:
    """Prefer one answer to another one. Both rows begin with the same prompt, and only their answers are targets."""

    line: int
    chosen: CompletionRow | ChatRow
    rejected: CompletionRow | ChatRow


Row = TextRow | CompletionRow | ChatRow | PreferenceRow


class _Text(Wire, frozen=True):
    text: str

    def row(self, line: int) -> Row:
        return TextRow(line, self.text)


class _Completion(Wire, frozen=True):
    prompt: str
    completion: str

    def row(self, line: int) -> Row:
        return CompletionRow(line, self.prompt, self.completion)


class _Function(Wire, frozen=True):
    name: str
    arguments: dict[str, Any] | str


class _ToolCall(Wire, frozen=True, omit_defaults=True):
    function: _Function
    id: str | None = None
    type: Literal["function"] = "function"

    def rendered(self, line: int) -> dict[str, object]:
        """As templates expect it: with the arguments as an object, which OpenAI's format has as a text."""
        arguments = self.function.arguments
        if isinstance(arguments, str):
            try:
                arguments = msgspec.json.decode(arguments, type=dict[str, Any])
            except msgspec.MsgspecError as error:
                raise MalformedRow("expected arguments that are a JSON object", line=line, field="messages") from error
        named: dict[str, object] = {} if self.id is None else {"id": self.id}
        return named | {"type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class _Message(Wire, frozen=True, omit_defaults=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    name: str | None = None
    weight: Literal[0, 1] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None

    def rendered(self, line: int) -> dict[str, object]:
        """Raises `MalformedRow` for fields that the role does not have."""
        if self.weight is not None and self.role != "assistant":
            raise MalformedRow("expected a weight on assistant messages only", line=line, field="messages")
        if self.tool_calls and self.role != "assistant":
            raise MalformedRow("expected tool_calls on assistant messages only", line=line, field="messages")
        if self.content is None and not self.tool_calls:
            raise MalformedRow("expected content, or tool_calls, in each message", line=line, field="messages")
        message: dict[str, object] = msgspec.to_builtins(self)
        message.setdefault("content", "")  # some templates read it, and none writes an empty text
        if self.tool_calls:
            message["tool_calls"] = [call.rendered(line) for call in self.tool_calls]
        return message


class _Chat(Wire, frozen=True):
    messages: list[_Message]
    tools: list[dict[str, Any]] | None = None

    def row(self, line: int) -> Row:
        messages = tuple(message.rendered(line) for message in self.messages)
        return ChatRow(line, messages, tuple(self.tools or ()))


class _Alpaca(Wire, frozen=True):
    instruction: str
    output: str
    input: str = ""

    def row(self, line: int) -> Row:
        """The Stanford Alpaca prompt template, word for word."""
        if self.input:
            prompt = (
                "Below is an instruction that describes a task, paired with an input that provides further context. "
                "Write a response that appropriately completes the request.\n\n"
                f"### Instruction:\n{self.instruction}\n\n### Input:\n{self.input}\n\n### Response:\n"
            )
        else:
            prompt = (
                "Below is an instruction that describes a task. "
                "Write a response that appropriately completes the request.\n\n"
                f"### Instruction:\n{self.instruction}\n\n### Response:\n"
            )
        return CompletionRow(line, prompt, self.output)


_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}


class _Turn(Wire, frozen=True, rename={"sender": "from"}):
    sender: Literal["human", "user", "gpt", "assistant", "system", "tool"]
    value: str


class _ShareGpt(Wire, frozen=True):
    conversations: list[_Turn]
    id: str | int | None = None

    def row(self, line: int) -> Row:
        turns: list[dict[str, object]] = [
            {"role": _SHAREGPT_ROLES[turn.sender], "content": turn.value} for turn in self.conversations
        ]
        return ChatRow(line, tuple(turns))


class _Preference(Wire, frozen=True):
    prompt: str | list[_Message]
    chosen: str | list[_Message]
    rejected: str | list[_Message]
    tools: list[dict[str, Any]] | None = None

    def row(self, line: int) -> Row:
        """Raises `MalformedRow` for texts beside messages, and for a prompt that ends with the assistant."""
        match self.prompt, self.chosen, self.rejected:
            case str(prompt), str(chosen), str(rejected) if self.tools is None:
                return PreferenceRow(line, CompletionRow(line, prompt, chosen), CompletionRow(line, prompt, rejected))
            case list(prompt), list(chosen), list(rejected):
                if prompt and prompt[-1].role == "assistant":
                    raise MalformedRow("expected a prompt that ends before the answer", line=line, field="prompt")
                before = [message.rendered(line) for message in prompt]
                before = [one | {"weight": 0} if one["role"] == "assistant" else one for one in before]
                answers = [tuple([message.rendered(line) for message in answer]) for answer in (chosen, rejected)]
                rows = [ChatRow(line, (*before, *answer), tuple(self.tools or ())) for answer in answers]
                return PreferenceRow(line, rows[0], rows[1])
            case _:
                raise MalformedRow(
                    "expected prompt, chosen and rejected as three texts, or as three lists of messages", line=line
                )


_Format = _Text | _Completion | _Chat | _Alpaca | _ShareGpt | _Preference
_FORMATS: dict[str, type[_Format]] = {
    "chosen": _Preference,
    "rejected": _Preference,
    "text": _Text,
    "prompt": _Completion,
    "completion": _Completion,
    "messages": _Chat,
    "instruction": _Alpaca,
    "conversations": _ShareGpt,
}


FORMATS = (
    'a row is {"text"}, {"prompt", "completion"}, {"messages": [{"role", "content"}, ...]}, '
    '{"instruction", "output"} (alpaca; "input" may be added), {"conversations": [{"from", "value"}, ...]} (ShareGPT) or, for a dpo loss, '
    '{"prompt", "chosen", "rejected"}'
)
"""What every error of a row's shape ends with."""


_KINDS: dict[type, str] = {NoneType: "null", bool: "a bool", str: "a text", list: "an array"}
"""JSON's names of what is no object; the rest are numbers."""


def parse_row(obj: object, line: int) -> Row:
    """Convert decoded JSON to a row. Raises `MalformedRow` with `line`, which counts from 1."""
    if not isinstance(obj, dict):
        raise MalformedRow(f"expected an object, got {_KINDS.get(type(obj), 'a number')}; {FORMATS}", line=line)
    row_format = next((_FORMATS[key] for key in _FORMATS if key in obj), None)
    if row_format is None:
        fields = ", ".join(sorted(repr(key)[:40] for key in list(obj)[:8])) or "none"
        raise MalformedRow(f"expected the fields of a row, got {fields}; {FORMATS}", line=line)
    try:
        row = msgspec.convert(obj, row_format).row(line)
        msgspec.json.encode(row)  # raises for text that UTF-8, and so the tokenizer, cannot hold
    except msgspec.ValidationError as error:
        found = explain(error, obj, row_format)
        raise MalformedRow(f"{_meant(obj, row_format) or found}; {FORMATS}", line=line, field=found.field) from error
    except UnicodeEncodeError as error:
        raise MalformedRow("expected valid Unicode, got half of a surrogate pair", line=line) from error
    return row


def _meant(obj: dict[object, object], row_format: type[_Format]) -> str:
    """What is wrong with a row that other libraries take; empty: nothing of the kind."""
    others = [key for key in _FORMATS if key in obj and key not in row_format.__struct_fields__]
    if others:
        first = next(key for key in _FORMATS if key in obj)
        return f"expected the fields of one format, got those of two: {first!r} and {others[0]!r}; leave one out"
    if row_format is _Completion and isinstance(obj.get("prompt"), list) and isinstance(obj.get("completion"), list):
        return "expected prompt and completion as texts, got messages; all of them are one list, messages"
    return ""


def parse_rows(objects: Iterable[object]) -> Iterator[Row]:
    """Convert an inline corpus; the first row is line 1. Raises `MalformedRow`."""
    for line, obj in enumerate(objects, start=1):
        LIMITS.check_line(line)
        yield parse_row(obj, line)
