"""`tool_choice`: which tool the model has to call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import msgspec

from coserve.api.generation.output_grammar import is_constrained
from coserve.api.openai.schemas import ChatRequest
from coserve.core.errors import InvalidRequest
from coserve.core.schemas.empty_fields import is_empty
from coserve.core.schemas.output_format import JsonSchema
from coserve.core.validation import explain


class _Function(msgspec.Struct, frozen=True):
    name: str
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct, frozen=True):
    function: _Function
    type: Literal["function"] = "function"


class _Allowed(msgspec.Struct, frozen=True):
    tools: list[_Tool]
    mode: Literal["auto", "required"] = "auto"


class _AllowedTools(msgspec.Struct, frozen=True):
    allowed_tools: _Allowed
    type: Literal["allowed_tools"] = "allowed_tools"


def with_allowed_tools(body: ChatRequest) -> ChatRequest:
    """Apply a choice of `allowed_tools`: keep only the tools that it names, and make its mode the choice. Raises
    `InvalidRequest`."""
    choice = body.tool_choice
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return body
    try:
        allowed = msgspec.convert(choice, _AllowedTools).allowed_tools
    except msgspec.ValidationError as error:
        raise InvalidRequest(
            f"expected tools with a type and a function's name: {explain(error, choice, _AllowedTools)}",
            field="tool_choice",
        ) from error
    names = {tool.function.name for tool in allowed.tools}
    if unknown := names - {tool.function.name for tool in _tools(body)}:
        raise InvalidRequest(f"expected some of the tools, got {', '.join(sorted(unknown))}", field="tool_choice")
    kept = [tool for tool in body.tools or [] if tool["function"]["name"] in names]
    return msgspec.structs.replace(body, tools=kept, tool_choice=allowed.mode)


def without_format(body: ChatRequest) -> ChatRequest:
    """Return the request without `response_format` if its answer has to be a call: a format is that of a text."""
    return msgspec.structs.replace(body, response_format=None) if _forces_call(body) else body


def _forces_call(body: ChatRequest) -> bool:
    return not is_empty(body.tool_choice) and body.tool_choice not in ("auto", "none")


def forced_call(body: ChatRequest) -> JsonSchema | None:
    """Return the schema of the one call, an object with `name` and `arguments`, that the answer has to be; None: any
    answer. Raises `InvalidRequest`, also for a tool that is no function."""
    functions = [tool.function for tool in _tools(body)]
    if not _forces_call(body):
        return None
    if is_constrained(body):
        raise InvalidRequest("expected auto or none in a request that constrains its text", field="tool_choice")
    if body.tool_choice != "required":
        name = _chosen_name(body.tool_choice)
        names = [function.name for function in functions]
        functions = [function for function in functions if function.name == name]
        if names and not functions:
            raise InvalidRequest(f"expected one of the tools {', '.join(names)}, got {name!r}", field="tool_choice")
    if not functions:
        raise InvalidRequest("expected tools of which it can be one, got none", field="tool_choice")
    definitions: JsonSchema = {}
    for function in functions:
        own = (function.parameters or {}).get("$defs") or {}
        if not isinstance(own, dict):
            raise InvalidRequest("expected $defs that are an object", field="tools")
        for key, found in own.items():
            if definitions.setdefault(key, found) != found:
                raise InvalidRequest(f"expected one definition of {key!r} in all tools' $defs", field="tools")
    return {"anyOf": [_call_of(function) for function in functions], "$defs": definitions}


@contextmanager
def naming_fields(body: ChatRequest) -> Iterator[None]:
    """Name the chat's fields in errors of what is made of them: the grammar of a forced call, and `max_tokens`."""
    try:
        yield
    except InvalidRequest as error:
        if body.structured_outputs is None and error.field == "structured_outputs.json":
            error.field = "tools"
        if body.documents and not body.chat_template_kwargs and error.field == "chat_template_kwargs":
            error.field = "documents"
        if body.max_completion_tokens is not None and error.field == "max_tokens":
            error.field = "max_completion_tokens"
        raise


def _tools(body: ChatRequest) -> list[_Tool]:
    try:
        return msgspec.convert(body.tools or [], list[_Tool])
    except msgspec.ValidationError as error:
        wrong = explain(error, body.tools, list[_Tool])
        raise InvalidRequest(f"expected functions with a name and parameters: {wrong}", field="tools") from error


def _chosen_name(choice: object) -> str:
    try:
        return msgspec.convert(choice, _Tool).function.name
    except msgspec.ValidationError as error:
        got = repr(choice)[:80]
        message = f"expected auto, none, required or a function's name, got {got}"
        raise InvalidRequest(message, field="tool_choice") from error


def _call_of(function: _Function) -> JsonSchema:
    parameters = {key: value for key, value in (function.parameters or {}).items() if key != "$defs"}
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": {"type": "object", **parameters}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
