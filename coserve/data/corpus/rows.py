"""Row formats of a corpus: text, prompt/completion, chat, alpaca, ShareGPT, preference, tokens. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile, zip_longest
from types import NoneType
from typing import Annotated, Any, Literal

import msgspec

from coserve.core.errors import InvalidRequest, MalformedRow
from coserve.core.messages import ChatMessage, FunctionCall, TemplateOptions, ToolCall, Tools, for_template
from coserve.core.schemas.empty_fields import drop_empty
from coserve.core.types import Wire
from coserve.core.validation import decoder_of, explain
from coserve.data.corpus.columns import Columns, listed
from coserve.data.corpus.limits import LIMITS
from coserve.data.corpus.token_rows import TokensFormat, TokensRow


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
    """Train on the assistant messages whose `weight` is not 0. The base's chat template renders the text, with `tools`,
    and with `options`: further variables that it reads. `completion_start`: index of the completion's first message;
    None: the last message is the completion."""

    line: int
    messages: tuple[dict[str, object], ...]
    tools: tuple[dict[str, object], ...] = ()
    completion_start: int | None = None
    options: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class PreferenceRow:
    """Prefer one answer to another. Both rows begin with the same prompt; only the answers are targets."""

    line: int
    chosen: CompletionRow | ChatRow
    rejected: CompletionRow | ChatRow


@dataclass(frozen=True)
class LabelledRow:
    """Learn from an answer that is desirable (`label`), or is not."""

    line: int
    answer: CompletionRow | ChatRow
    label: bool


Row = TextRow | CompletionRow | ChatRow | PreferenceRow | LabelledRow | TokensRow


class _Text(Wire, frozen=True):
    text: str

    def row(self, line: int) -> Row:
        return TextRow(line, self.text)


def _rendered(messages: list[ChatMessage], line: int, field: str) -> list[dict[str, object]]:
    """Return the messages as chat templates expect them. Raises `MalformedRow` with `field`."""
    if any(message.content is None and not message.tool_calls for message in messages):
        raise MalformedRow("expected content, or tool_calls, in each message", line=line, field=field)
    try:
        return for_template(messages, field)
    except InvalidRequest as error:
        raise MalformedRow(error.message, line=line, field=error.field) from error


def _system(text: str) -> list[dict[str, object]]:
    return [{"role": "system", "content": text}] if text else []


def _context(messages: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the messages with weight 0 on the assistant's, so that none is learned."""
    return [one | {"weight": 0} if one["role"] == "assistant" else one for one in messages]


class _Completion(Wire, frozen=True):
    prompt: str | list[ChatMessage]
    completion: str | list[ChatMessage]
    tools: Tools | None = None
    chat_template_kwargs: TemplateOptions | None = None

    def row(self, line: int) -> Row:
        """Return the row. Raises `MalformedRow` for texts combined with messages or tools."""
        match self.prompt, self.completion:
            case str(prompt), str(completion):
                _refuse_beside_texts(self, line)
                return CompletionRow(line, prompt, completion)
            case list(prompt), list(completion):
                before = _context(_rendered(prompt, line, "prompt"))
                after = _rendered(completion, line, "completion")
                return _chat_row(self, line, [*before, *after], len(before))
            case _:
                raise MalformedRow(
                    "expected prompt and completion as two texts, or as two lists of messages",
                    line=line,
                    field="completion",
                )


class _Labelled(_Completion, frozen=True, kw_only=True):
    label: bool

    def row(self, line: int) -> LabelledRow:
        answer = super().row(line)
        assert isinstance(answer, CompletionRow | ChatRow), "expected an answer"
        return LabelledRow(line, answer, self.label)


class _Chat(Wire, frozen=True):
    messages: list[ChatMessage]
    system: str = ""
    tools: Tools | None = None
    chat_template_kwargs: TemplateOptions | None = None

    def row(self, line: int) -> Row:
        return _chat_row(self, line, [*_system(self.system), *_rendered(self.messages, line, "messages")])


class _Alpaca(Wire, frozen=True):
    instruction: str
    output: str
    input: str = ""

    def row(self, line: int) -> CompletionRow:
        """Return the row, in the Stanford Alpaca prompt template, word for word."""
        if self.input:
            prompt = (
                "Below is an instruction that describes a task, paired with an input that provides further context. "
                "Write a response that appropriately completes the request.\n\n"
                f"### Instruction:\n{self.instruction}\n\n### Input:\n{self.input}\n\n### Response:\n"
            )
        else:
            prompt = (
                "Below is an instruction that describes a task. Write a response that appropriately completes the "
                f"request.\n\n### Instruction:\n{self.instruction}\n\n### Response:\n"
            )
        return CompletionRow(line, prompt, self.output)


_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_call": "assistant",
}


class _Turn(Wire, frozen=True, rename={"sender": "from"}):
    sender: Literal["human", "user", "gpt", "assistant", "system", "tool", "observation", "function_call"]
    value: str
    weight: Literal[0, 1] | None = None

    def message(self) -> dict[str, object]:
        role = _SHAREGPT_ROLES[self.sender]
        weighed = {"weight": self.weight} if role == "assistant" and self.weight is not None else {}
        if self.sender != "function_call":
            return {"role": role, "content": self.value, **weighed}
        either: Any = FunctionCall | Annotated[list[FunctionCall], msgspec.Meta(min_length=1)]
        called = msgspec.json.decode(self.value, type=either)
        calls = [ToolCall(function=call) for call in (called if isinstance(called, list) else [called])]
        return for_template([ChatMessage(role="assistant", tool_calls=calls)])[0] | weighed


class _ShareGpt(Wire, frozen=True):
    conversations: list[_Turn]
    system: str = ""
    tools: Tools | str | None = None
    id: str | int | None = None

    def row(self, line: int) -> Row:
        """Return the row. Raises `MalformedRow` for calls and tools that are not JSON."""
        try:
            messages = (*_system(self.system), *(turn.message() for turn in self.conversations))
            tools = self.tools or []
            if isinstance(tools, str):
                tools = msgspec.json.decode(tools, type=Tools)
        except (msgspec.MsgspecError, InvalidRequest, RecursionError) as error:
            raise MalformedRow(f"expected function_call and tools in JSON: {error}", line=line) from error
        return ChatRow(line, messages, tuple(_tool(tool) for tool in tools))


def _tool(tool: dict[str, object]) -> dict[str, object]:
    """Return a tool as OpenAI writes it, of which ShareGPT's rows have the function alone."""
    return tool if "function" in tool else {"type": "function", "function": tool}


class _Preference(Wire, frozen=True):
    chosen: str | list[ChatMessage]
    rejected: str | list[ChatMessage]
    prompt: str | list[ChatMessage] | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateOptions | None = None

    def row(self, line: int) -> Row:
        """Return the row. Raises `MalformedRow` for texts combined with messages, for texts without a prompt, and for a
        prompt that ends with the assistant."""
        match self.prompt, self.chosen, self.rejected:
            case str(prompt), str(chosen), str(rejected):
                _refuse_beside_texts(self, line)
                return PreferenceRow(line, CompletionRow(line, prompt, chosen), CompletionRow(line, prompt, rejected))
            case list(prompt), list(chosen), list(rejected):
                before = _rendered(prompt, line, "prompt")
                answers = [_rendered(chosen, line, "chosen"), _rendered(rejected, line, "rejected")]
                return self._of_messages(line, before, *answers)
            case _, list(chosen), list(rejected) if self._has_whole_conversations():
                whole = _rendered(chosen, line, "chosen"), _rendered(rejected, line, "rejected")
                length = _common_messages(line, *whole)
                return self._of_messages(line, whole[0][:length], whole[0][length:], whole[1][length:])
            case None, str(), str():
                raise MalformedRow(
                    "expected a prompt, got none: where it ends within chosen and rejected cannot be told from texts; "
                    "give the prompt as a text of its own, or chosen and rejected as lists of messages",
                    line=line,
                    field="prompt",
                )
            case None, _, _:
                raise MalformedRow(
                    "expected chosen and rejected as two lists of messages that begin with the prompt", line=line
                )
            case _:
                raise MalformedRow(
                    "expected prompt, chosen and rejected as three texts, or as three lists of messages", line=line
                )

    def _has_whole_conversations(self) -> bool:
        """Return whether the answers include the prompt: there is no separate prompt, or it is the text of one of the
        messages that both answers begin with."""
        if isinstance(self.prompt, list) or isinstance(self.chosen, str) or isinstance(self.rejected, str):
            return False
        common = takewhile(lambda pair: pair[0] == pair[1], zip(self.chosen, self.rejected, strict=False))
        return self.prompt is None or any(message.content == self.prompt for message, _ in common)

    def _of_messages(
        self,
        line: int,
        prompt: list[dict[str, object]],
        chosen: list[dict[str, object]],
        rejected: list[dict[str, object]],
    ) -> PreferenceRow:
        if prompt and prompt[-1]["role"] == "assistant":
            raise MalformedRow("expected a prompt that ends before the answer", line=line, field="prompt")
        before = _context(prompt)
        return PreferenceRow(
            line, _chat_row(self, line, [*before, *chosen]), _chat_row(self, line, [*before, *rejected])
        )


class _PreferenceInput(Wire, frozen=True):
    messages: list[ChatMessage]
    tools: Tools | None = None
    parallel_tool_calls: bool | None = None


class _OpenAIPreference(Wire, frozen=True):
    input: _PreferenceInput
    preferred_output: list[ChatMessage]
    non_preferred_output: list[ChatMessage]

    def row(self, line: int) -> Row:
        given = self.input
        return _Preference(
            prompt=given.messages, chosen=self.preferred_output, rejected=self.non_preferred_output, tools=given.tools
        ).row(line)


def _chat_row(
    row: _Completion | _Chat | _Preference, line: int, messages: list[dict[str, object]], start: int | None = None
) -> ChatRow:
    return ChatRow(line, tuple(messages), tuple(row.tools or ()), start, row.chat_template_kwargs or {})


def _refuse_beside_texts(row: _Completion | _Preference, line: int) -> None:
    """Raise `MalformedRow` for fields that are valid only with messages."""
    for name in ("tools", "chat_template_kwargs"):
        if getattr(row, name):
            raise MalformedRow(f"expected {name} beside messages only, got texts", line=line, field=name)


def _common_messages(line: int, chosen: list[dict[str, object]], rejected: list[dict[str, object]]) -> int:
    """Return the number of messages that both lists begin with, whatever their weights. Raises `MalformedRow` unless an
    answer of the assistant follows in both."""
    pairs = list(zip_longest(*(({**one, "weight": None} for one in messages) for messages in (chosen, rejected))))
    length = next((number for number, (one, other) in enumerate(pairs) if one != other), len(pairs))
    if length == len(pairs):
        raise MalformedRow(
            "expected chosen and rejected that differ, got the same messages", line=line, field="rejected"
        )
    roles = ["none" if one is None else str(one["role"]) for one in pairs[length]]
    if length == 0:
        got = "none" if "none" in roles else "different first ones"
        raise MalformedRow(
            f"expected chosen and rejected that begin with the same messages, the prompt, got {got}",
            line=line,
            field="rejected",
        )
    if roles != ["assistant", "assistant"]:
        raise MalformedRow(
            "expected chosen and rejected to differ first in messages of the assistant, "
            f"got {roles[0]} and {roles[1]} (message {length}, from 0)",
            line=line,
            field="rejected",
        )
    return length


_Format = _Text | _Completion | _Chat | _Alpaca | _ShareGpt | _Preference | _OpenAIPreference | TokensFormat
_FORMATS: dict[str, type[_Format]] = {
    "chosen": _Preference,
    "rejected": _Preference,
    "preferred_output": _OpenAIPreference,
    "non_preferred_output": _OpenAIPreference,
    "text": _Text,
    "prompt": _Completion,
    "completion": _Completion,
    "messages": _Chat,
    "instruction": _Alpaca,
    "conversations": _ShareGpt,
    "input_ids": TokensFormat,
}
for _format in _FORMATS.values():
    decoder_of(_format)  # create decoders now: rows are converted on several threads


FORMATS = (
    'a row is {"text"}, {"prompt", "completion"} (texts, or lists of messages), '
    '{"messages": [{"role", "content"}, ...]}, {"instruction", "output"} (alpaca; "input" may be added), '
    '{"conversations": [{"from", "value"}, ...]} (ShareGPT), {"input_ids", "labels"} (tokenised) '
    'or, for a preference loss, {"prompt", "chosen", "rejected"}, {"prompt", "completion", "label"} (KTO) '
    'or {"input": {"messages"}, "preferred_output", "non_preferred_output"} (OpenAI)'
)
"""Ending of every error about a row's shape."""
OTHER_NAMES = "`columns` names columns that are called otherwise (--columns prompt=question,completion=answer)"


_KINDS: dict[type, str] = {NoneType: "null", bool: "a bool", str: "a text", list: "an array"}
"""Names of JSON values that are not objects; any other type is a number."""


def parse_row(obj: object, line: int, columns: Columns | None = None) -> Row:
    """Convert decoded JSON to a row; fields that are null count as absent, and unknown fields of messages that are
    empty or in `empty_fields.IDLE` are removed from `obj`. Raises `MalformedRow` with `line`, which counts from 1."""
    columns = Columns() if columns is None else columns
    if not isinstance(obj, dict):
        raise MalformedRow(f"expected an object, got {_KINDS.get(type(obj), 'a number')}; {FORMATS}", line=line)
    obj = {name: value for name, value in obj.items() if value is not None}
    if not columns.names:
        _read_as_one_format(obj, columns)
    row_format, read = choose_columns(obj, line, columns)
    found = {field: obj[column] for field, column in read.items()}
    try:
        try:
            row = msgspec.convert(found, row_format).row(line)
        except msgspec.ValidationError:
            drop_empty(found, row_format)
            row = msgspec.convert(found, row_format).row(line)
        msgspec.json.encode(row)  # raises for text that cannot be UTF-8, which the tokenizer needs
    except msgspec.ValidationError as error:
        wrong = explain(error, found, row_format)
        raise MalformedRow(f"{wrong}; {FORMATS}", line=line, field=wrong.field) from error
    except UnicodeEncodeError as error:
        raise MalformedRow("expected valid Unicode, got half of a surrogate pair", line=line) from error
    return row


def _read_as_one_format(row: dict[str, object], columns: Columns) -> None:
    """Rename `conversations` of roles and contents to `messages`, and remove fields that repeat what those of another
    format say: they become `columns.unused`."""
    match row:
        case {"conversations": [{"role": _}, *_]} if "messages" not in row:
            row["messages"] = row.pop("conversations")
    repeated = list[str]()
    match row:
        case {"messages": messages, "chosen": chosen} if messages == chosen:
            repeated.append("messages")
        case {"messages": [*messages], "prompt": str(prompt)} if "completion" not in row:
            if any(isinstance(message, dict) and message.get("content") == prompt for message in messages):
                repeated.append("prompt")
        case {"text": str(text), "instruction": str(instruction), "output": str(output)}:
            alpaca = _Alpaca(instruction, output, str(row.get("input", ""))).row(1)
            if text == alpaca.prompt + output:
                repeated.append("text")
    for name in repeated:
        del row[name]
    columns.add_unused(repeated)


def choose_columns(found: Collection[object], line: int, columns: Columns) -> tuple[type[_Format], dict[str, str]]:
    """Return the format of a row with these columns, and the column that each of its fields is read from.

    Raises `MalformedRow` for columns that fit no format, that fit two, or whose names are nearly a field's.
    """
    present = columns.present(found)
    row_format = next((_FORMATS[key] for key in _FORMATS if key in (present or found)), None)
    if row_format is None:
        named = (
            f"the columns {', '.join(map(repr, columns.names.values()))}" if columns.names else "the fields of a row"
        )
        raise MalformedRow(f"expected {named}, got {listed(found)}; {FORMATS}; {OTHER_NAMES}", line=line)
    if row_format is _Completion and columns.have_label(found):
        row_format = _Labelled
    fields = msgspec.structs.fields(row_format)
    names = [field.encode_name for field in fields]
    others = [key for key in _FORMATS if key in (present or found) and key not in names]
    if others:
        first = next(key for key in _FORMATS if key in (present or found))
        raise MalformedRow(
            f"expected the fields of one format, got those of two: {first!r} and {others[0]!r}; leave one out, or "
            f"name the columns to read; {FORMATS}",
            line=line,
            field=others[0],
        )
    return row_format, columns.read(found, names, [field.encode_name for field in fields if field.required], line)


def parse_rows(objects: Iterable[object], columns: Columns | None = None) -> Iterator[Row]:
    """Convert the rows of an inline corpus; the first is line 1. Raises `MalformedRow`."""
    for line, obj in enumerate(objects, start=1):
        LIMITS.check_line(line)
        yield parse_row(obj, line, columns)
