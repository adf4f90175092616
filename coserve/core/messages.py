"""Chat messages, in requests and in rows, and the form in which chat templates get them. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from coserve.core.errors import InvalidRequest
from coserve.core.limits import MAX_PARTS, AuthorName, Text

MAX_TOOLS = 1024
"""Maximum tools of a chat, and maximum calls of a message."""
_Name = Annotated[str, Meta(max_length=256)]
_Object = Annotated[dict[_Name, Any], Meta(max_length=1024)]
Tools = Annotated[list[_Object], Meta(max_length=MAX_TOOLS)]
"""JSON schemas of functions, as in OpenAI's API. The template shows them to the model."""
TemplateOptions = Annotated[dict[Annotated[str, Meta(max_length=64)], Any], Meta(max_length=32)]
"""Variables that the template reads, such as Qwen3's `enable_thinking`."""
Malformed = Literal["refused", "text", "entry"]
"""Treatment of a call's arguments that are no JSON object: an error, the text, or the text as the entry `arguments`
of an object."""


class _Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class TextPart(_Struct, frozen=True):
    """A text part of a message's content, the only kind supported."""

    type: Literal["text"]
    text: Text


class FunctionCall(_Struct, frozen=True):
    name: _Name
    arguments: _Object | Text | None = None
    """An object, or a text with its JSON. Null and an empty text mean no arguments."""


class ToolCall(_Struct, frozen=True):
    function: FunctionCall
    id: _Name | None = None
    type: Literal["function"] | None = None


class ChatMessage(_Struct, frozen=True):
    """One message of a chat. `developer` means `system`; null counts as absent."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Meta(max_length=MAX_PARTS)] | None = None
    """Parts are joined by line breaks, as in vLLM."""
    name: AuthorName | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    """Allowed in the assistant's messages only."""
    tool_call_id: AuthorName | None = None
    reasoning_content: Text | None = None
    """Reasoning, in the assistant's messages only; for chat templates that read it."""
    reasoning: Text | None = None
    """vLLM's name of `reasoning_content`."""
    weight: Literal[0, 1] | None = None
    """For the assistant's messages in rows: 0 excludes the message from the loss. Ignored in requests."""

    def __post_init__(self) -> None:
        if not self.reasoning:
            return
        if self.reasoning_content not in (None, "", self.reasoning):
            raise ValueError("expected the same text in reasoning and reasoning_content")
        msgspec.structs.force_setattr(self, "reasoning_content", self.reasoning)
        msgspec.structs.force_setattr(self, "reasoning", None)

    @property
    def text(self) -> str:
        content = self.content or ""
        return content if isinstance(content, str) else "\n".join(part.text for part in content)


class Chat(_Struct, frozen=True):
    """Everything that a chat template renders."""

    messages: list[ChatMessage]
    tools: Tools = []
    options: TemplateOptions = {}
    add_generation_prompt: bool = True
    """Whether the text ends with the beginning of an answer. Ignored with `continue_final_message`."""
    continue_final_message: bool = False
    """Whether the last message is left open, for the model to continue."""


def characters(messages: Iterable[ChatMessage]) -> int:
    """Return the total number of characters in the messages' texts."""
    return sum(len(message.text) + len(message.reasoning_content or "") for message in messages)


def for_template(
    messages: Sequence[ChatMessage], field: str = "messages", *, malformed: Malformed = "refused"
) -> list[dict[str, object]]:
    """Return the messages as transformers passes them to a chat template: calls' arguments as objects, weights
    included. `malformed`: what becomes of a text that is no JSON object, which a model may have written. Raise
    `InvalidRequest` with the field for keys that the role does not allow, and for refused arguments."""
    return [_for_template(message, f"{field}[{index}]", malformed) for index, message in enumerate(messages)]


def _for_template(message: ChatMessage, field: str, malformed: Malformed) -> dict[str, object]:
    found: dict[str, object] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.text,  # some templates read it of every message, and none writes an empty text
    }
    for name in ("tool_calls", "reasoning_content", "weight"):
        if getattr(message, name) not in (None, "", []) and message.role != "assistant":
            raise InvalidRequest(f"expected {name} on assistant messages only", field=f"{field}.{name}")
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        found["tool_calls"] = [_call(call, f"{field}.tool_calls[{index}]", malformed) for index, call in calls]
    given = {
        "name": message.name or None,
        "tool_call_id": message.tool_call_id or None,
        "reasoning_content": message.reasoning_content or None,
        "weight": message.weight,
    }
    return found | {name: value for name, value in given.items() if value is not None}


def _call(call: ToolCall, field: str, malformed: Malformed) -> dict[str, object]:
    arguments = call.function.arguments or {}
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError) as error:
            if malformed == "refused":
                wanted = "expected arguments that are a JSON object"
                raise InvalidRequest(wanted, field=f"{field}.function.arguments") from error
            if malformed == "entry":
                arguments = {"arguments": arguments}
    named: dict[str, object] = {} if call.id is None else {"id": call.id}
    return named | {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
