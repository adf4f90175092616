"""Translates `/v1/messages` into chats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from coserve.api.anthropic import schemas
from coserve.api.http.body_types import refuse_unsupported
from coserve.api.openai.schemas import ChatRequest, StreamOptions
from coserve.core.errors import EmptyPrompt, InvalidRequest
from coserve.core.messages import Chat, ChatMessage, FunctionCall, TemplateOptions, ToolCall
from coserve.core.schemas.output_format import JsonSchemaFormat, ResponseFormat


def chat_of(body: schemas.MessagesRequest, template: str | None) -> ChatRequest:
    """Return the chat that the request asks for. `template`: the base's chat template. Raises `InvalidRequest` and
    `EmptyPrompt`."""
    refuse_unsupported(body)
    format = body.output_format if body.output_config is None else body.output_config.format
    schema = None if format is None else JsonSchemaFormat(schema=format.schema, name="answer", strict=True)
    choice = body.tool_choice or schemas.ToolChoice(type="auto")
    return ChatRequest(
        model=body.model,
        messages=_messages(body),
        tools=_tools(body) or None,
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        chat_template_kwargs=_options(body, template) or None,
        response_format=None if schema is None else ResponseFormat(type="json_schema", json_schema=schema),
        continue_final_message=_is_begun(body),
        max_completion_tokens=body.max_tokens,
        stop=body.stop_sequences or None,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        slo_class=body.slo_class,
        stream=body.stream,
        stream_options=StreamOptions(include_usage=True, continuous_usage_stats=True) if body.stream else None,
    )


def template_chat(body: schemas.CountTokensRequest, template: str | None) -> Chat:
    """Return what the base's chat template renders of the request. Raises `InvalidRequest` and `EmptyPrompt`."""
    return Chat(
        messages=_messages(body),
        tools=_tools(body),
        options=_options(body, template),
        continue_final_message=_is_begun(body),
    )


def _messages(body: schemas.CountTokensRequest) -> list[ChatMessage]:
    if not body.messages:
        raise EmptyPrompt("expected at least one message", field="messages")
    system = [] if not body.system else [ChatMessage(role="system", content=_text(body.system))]
    return [*system, *(found for message in body.messages for found in _of_message(message))]


def _of_message(message: schemas.InputMessage) -> Iterator[ChatMessage]:
    if isinstance(message.content, str):
        yield ChatMessage(role=message.role, content=message.content)
    elif message.role == "assistant":
        yield _answer(message.content)
    else:
        texts: list[schemas.TextBlock] = []
        for block in message.content:
            match block:
                case schemas.TextBlock():
                    texts.append(block)
                case schemas.ToolResultBlock():
                    if texts:
                        yield ChatMessage(role=message.role, content=_text(texts))
                        texts = []
                    yield ChatMessage(role="tool", content=_text(block.content), tool_call_id=block.tool_use_id)
                case schemas.ThinkingBlock() | schemas.RedactedThinkingBlock() | schemas.ToolUseBlock():
                    raise InvalidRequest("expected thinking and tool_use in the assistant's messages", field="messages")
        if texts or not message.content:
            yield ChatMessage(role=message.role, content=_text(texts))


def _answer(blocks: Iterable[schemas.InputBlock]) -> ChatMessage:
    texts: list[schemas.TextBlock] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in blocks:
        match block:
            case schemas.TextBlock():
                texts.append(block)
            case schemas.ThinkingBlock(thinking=thinking):
                thoughts.append(thinking)
            case schemas.RedactedThinkingBlock():
                pass
            case schemas.ToolUseBlock():
                function = FunctionCall(name=block.name, arguments=block.input)
                calls.append(ToolCall(function=function, id=block.id, type="function"))
            case schemas.ToolResultBlock():
                raise InvalidRequest("expected tool_result in the user's messages", field="messages")
    return ChatMessage(
        role="assistant",
        content=_text(texts) if texts else None,
        reasoning_content="\n".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _text(content: str | Sequence[schemas.TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)


def _is_begun(body: schemas.CountTokensRequest) -> bool:
    """Return whether the last message is the beginning of the answer."""
    last = body.messages[-1]
    blocks = [] if isinstance(last.content, str) else last.content
    return last.role == "assistant" and not any(isinstance(block, schemas.ToolUseBlock) for block in blocks)


def _tools(body: schemas.CountTokensRequest) -> list[dict[str, Any]]:
    """Return the tools as OpenAI has them."""
    return [_tool(tool) for tool in body.tools or []]


def _tool(tool: schemas.CustomTool) -> dict[str, Any]:
    given = {"description": tool.description, "strict": tool.strict}
    function = {"name": tool.name, "parameters": tool.input_schema}
    return {
        "type": "function",
        "function": function | {name: value for name, value in given.items() if value is not None},
    }


def _tool_choice(choice: schemas.ToolChoice) -> object:
    match choice.type:
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": choice.name or ""}}
        case _:
            return choice.type


def _options(body: schemas.CountTokensRequest, template: str | None) -> TemplateOptions:
    """Return the chat template's variables. Agents ask for thinking with any model: a template that does not read
    `enable_thinking` gets no such variable, since unknown ones are refused."""
    if body.thinking is None or "enable_thinking" not in (template or ""):
        return {}
    return {"enable_thinking": body.thinking.type != "disabled"}
