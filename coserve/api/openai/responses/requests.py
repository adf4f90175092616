"""Translates `/v1/responses` into chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from coserve.api.http.body_types import refuse_unsupported
from coserve.api.openai.responses.schemas import LOGPROBS, InputItem, ResponseRequest, TextFormat
from coserve.api.openai.schemas import ChatRequest, StreamOptions
from coserve.core.errors import EmptyPrompt, InvalidRequest
from coserve.core.limits import MAX_LABEL, MAX_MESSAGES
from coserve.core.messages import MAX_TOOLS, ChatMessage, FunctionCall, ToolCall
from coserve.core.sampling import SamplingFields
from coserve.core.schemas.empty_fields import is_empty
from coserve.core.schemas.output_format import JsonSchemaFormat, ResponseFormat

SUMMARISE = (
    "Summarise this conversation for somebody who continues it without having read it: what was asked, what was done "
    "and found, what was decided, and what is left to do. Names, numbers, paths and errors that matter stay exact. "
    "Write the summary alone."
)
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text")


_SAME = (
    *SamplingFields.__struct_fields__,
    *("model", "parallel_tool_calls", "top_logprobs", "seed", "slo_class", "service_tier", "stream"),
    *("chat_template_kwargs", "structured_outputs", "stop", "cache_salt"),
)
"""Fields that chats have, too."""


def chat_of(body: ResponseRequest, before: Sequence[InputItem]) -> ChatRequest:
    """Return the chat that the request asks for. `before`: items of the previous responses. Raises `InvalidRequest`."""
    refuse_unsupported(body)
    effort = (body.reasoning or {}).get("effort")
    wants_logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not wants_logprobs:
        raise InvalidRequest(f"expected include with {LOGPROBS}", field="top_logprobs")
    return ChatRequest(
        **{name: getattr(body, name) for name in _SAME},
        messages=_messages(body, before),
        tools=[_tool(each, f"tools[{index}]") for index, each in enumerate(body.tools or [])] or None,
        tool_choice=_tool_choice(body.tool_choice),
        response_format=_format(None if body.text is None else body.text.format),
        max_completion_tokens=body.max_output_tokens,
        logprobs=wants_logprobs,
        reasoning_effort=effort if isinstance(effort, str) else None,
        stream_options=StreamOptions(include_usage=True) if body.stream else None,
    )


def asking_for_summary(chat: ChatRequest) -> ChatRequest:
    """Return the chat with a request for its summary at the end, in the last message if that is the user's: many
    templates allow no two of them."""
    last = chat.messages[-1]
    before, text = (
        (chat.messages[:-1], f"{last.text}\n\n{SUMMARISE}") if last.role == "user" else (chat.messages, SUMMARISE)
    )
    return msgspec.structs.replace(chat, messages=[*before, ChatMessage(role="user", content=text)])


def later_starts(messages: Sequence[ChatMessage]) -> tuple[int, list[int]]:
    """Return the number of system messages at the beginning, and where the others may start if the oldest are left out:
    behind them, then one exchange later each time, then within the last one. No call is parted from its output."""
    head = next((at for at, one in enumerate(messages) if one.role not in ("system", "developer")), len(messages))
    calls = {call.id for one in messages for call in one.tool_calls or ()}
    starts, awaited = list[int](), set[str | None]()  # a chat may start where no output awaits its call
    for at in range(len(messages) - 1, head, -1):
        one = messages[at]
        awaited |= {one.tool_call_id} & calls
        awaited.difference_update(call.id for call in one.tool_calls or ())
        starts += [at] if not awaited and one.role != "tool" else []
    asked = [at for at in reversed(starts) if messages[at].role == "user"]
    last = asked[-1] if asked else head
    return head, [head, *asked, *(at for at in reversed(starts) if at > last)]


def _messages(body: ResponseRequest, before: Sequence[InputItem]) -> list[ChatMessage]:
    found = [] if not body.instructions else [ChatMessage(role="system", content=body.instructions)]
    items = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    if len(before) + len(items) > MAX_MESSAGES:
        raise InvalidRequest(f"expected at most {MAX_MESSAGES} items with those of previous responses", field="input")
    numbered = list(enumerate([*before, *items], -len(before)))
    compacted = max((index for index, item in numbered if item.type == "compaction"), default=-len(before))
    asked: list[str] = []
    for index, item in numbered:
        message = _message(item, f"input[{index}]")
        if index < compacted and message.role == "user":  # its answer is left out, and many templates refuse two
            asked.append(message.text)
            continue
        if asked:
            found.append(ChatMessage(role="user", content="\n\n".join(asked)))
            asked = []
        last = found[-1] if found else None
        if last is not None and last.role == message.role == "assistant" and _continues(last, message):
            if last.tool_calls:
                if len(last.tool_calls) == MAX_TOOLS:
                    raise InvalidRequest(f"expected at most {MAX_TOOLS} calls in a row", field=f"input[{index}]")
                last.tool_calls.extend(message.tool_calls or ())
            else:
                found[-1] = _joined(last, message)
        else:
            found.append(message)
    if not found:
        raise EmptyPrompt("expected at least one item", field="input")
    return found


def _message(item: InputItem, field: str) -> ChatMessage:
    match item.type:
        case "item_reference":
            raise AssertionError("references are replaced by their items first")
        case "function_call":
            name, call_id = _label(item.name, f"{field}.name"), _label(item.call_id, f"{field}.call_id")
            call = ToolCall(function=FunctionCall(name=name, arguments=item.arguments), id=call_id)
            return ChatMessage(role="assistant", tool_calls=[call])
        case "function_call_output":
            call_id = _label(item.call_id, f"{field}.call_id")
            return ChatMessage(role="tool", content=_text(item.output, f"{field}.output"), tool_call_id=call_id)
        case "reasoning":
            thoughts = _text(item.content, f"{field}.content") or None
            return ChatMessage(role="assistant", reasoning_content=thoughts)
        case "compaction":
            if not isinstance(item.encrypted_content, str):
                raise InvalidRequest("expected the text of a compaction", field=f"{field}.encrypted_content")
            return ChatMessage(role="assistant", content=item.encrypted_content)
        case "message":
            if item.role is None:
                raise InvalidRequest("expected a role", field=f"{field}.role")
            return ChatMessage(role=item.role, content=_text(item.content, f"{field}.content"))


def _label(given: str | None, field: str) -> str:
    """Return a name or an id, which chats have of at most `MAX_LABEL` characters. A model may write a longer one."""
    if given is None or len(given) > MAX_LABEL:
        got = "none" if given is None else f"{len(given)} characters"
        raise InvalidRequest(f"expected a text of at most {MAX_LABEL} characters, got {got}", field=field)
    return given


def _continues(last: ChatMessage, message: ChatMessage) -> bool:
    """Return whether both are parts of one answer: reasoning, then a text, then calls."""
    return bool(message.tool_calls) or (last.content is None and not last.tool_calls and message.content is not None)


def _joined(last: ChatMessage, message: ChatMessage) -> ChatMessage:
    return ChatMessage(
        role="assistant",
        content=message.content if last.content is None else last.content,
        reasoning_content=last.reasoning_content or message.reasoning_content,
        tool_calls=message.tool_calls,
    )


def _text(content: str | Sequence[dict[str, Any]] | None, field: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for index, part in enumerate(content):
        if part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            kinds = ", ".join(_TEXT_PARTS)
            got = f"{part.get('type')!r}"[:80]
            raise InvalidRequest(f"expected text, of type {kinds}, got {got}", field=f"{field}[{index}]")
    return "\n".join(part["text"] for part in content)


def _tool(tool: dict[str, Any], field: str) -> dict[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        got = f"{tool.get('type')!r}"[:80]
        raise InvalidRequest(f"expected a function with a name, got {got}: no tool is run here", field=field)
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: object) -> object:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function" and "function" not in choice:
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools" and isinstance(tools := choice.get("tools"), list):
        return {"type": "allowed_tools", "allowed_tools": choice | {"tools": [_tool_choice(tool) for tool in tools]}}
    return choice


def _format(found: TextFormat | None) -> ResponseFormat | None:
    if found is None or found.type == "text":
        return None
    if found.type == "json_object":
        return ResponseFormat(type="json_object")
    if is_empty(found.schema):
        raise InvalidRequest("expected a schema", field="text.format.schema")
    schema = JsonSchemaFormat(schema=found.schema or {}, name=found.name, strict=found.strict)
    return ResponseFormat(type="json_schema", json_schema=schema)
