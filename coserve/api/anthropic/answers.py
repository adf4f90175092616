"""Translates chat completions into answers of `/v1/messages`, whole and as events."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec

from coserve.api.anthropic import schemas
from coserve.api.openai.schemas import ChatChunk, ChatChunkChoice, ChatCompletion, ChatFinish, ToolCallDelta
from coserve.core.schemas.generation import Usage

_REASONS: dict[ChatFinish, schemas.StopReason] = {"length": "max_tokens", "tool_calls": "tool_use"}


def message(chat: ChatCompletion) -> schemas.Message:
    (choice,) = chat.choices
    answer, content = choice.message, list[schemas.OutputBlock]()
    if isinstance(answer.reasoning_content, str):
        content.append(schemas.ThinkingBlock(thinking=answer.reasoning_content))
    if answer.content:
        content.append(schemas.TextBlock(text=answer.content))
    for call in answer.tool_calls or []:
        content.append(
            schemas.ToolUseBlock(id=call.id, name=call.function.name, input=_object(call.function.arguments))
        )
    reason, sequence = _ending(choice.finish_reason, choice.stop_reason)
    return schemas.Message(
        id=_new_id(),
        model=chat.model,
        content=content,
        stop_reason=reason,
        stop_sequence=sequence,
        usage=_usage(chat.usage),
    )


def _new_id() -> str:
    return f"msg_{secrets.token_hex(12)}"


def _object(arguments: str) -> dict[str, Any]:
    """Return a call's arguments; an empty dict if the model did not write a JSON object, as when it was cut off."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {}


def _ending(finish: ChatFinish, stop: object) -> tuple[schemas.StopReason, str | None]:
    if finish == "stop" and isinstance(stop, str):
        return "stop_sequence", stop
    return _REASONS.get(finish, "end_turn"), None


def _usage(usage: Usage) -> schemas.MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return schemas.MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cache_read_input_tokens=cached)


class MessageEvents:
    """Turns the chunks of a chat into events."""

    def __init__(self) -> None:
        self._index = -1
        self._open: schemas.OutputBlock | None = None
        """The block that is being sent, as it began."""

    async def of(self, chunks: AsyncGenerator[ChatChunk, None]) -> AsyncGenerator[schemas.MessageEvent, None]:
        """Yield the events. Raises what `chunks` raises."""
        ending, usage, begun = schemas.EventDelta(), schemas.MessageUsage(0, 0), False
        async for chunk in chunks:
            if isinstance(chunk.usage, Usage):
                usage = _usage(chunk.usage)
            if not begun:
                begun = True
                yield schemas.MessageEvent(
                    type="message_start", message=schemas.Message(id=_new_id(), model=chunk.model, usage=usage)
                )
            for choice in chunk.choices:
                for event in self._of_choice(choice):
                    yield event
                if choice.finish_reason is not None:
                    reason, sequence = _ending(choice.finish_reason, choice.stop_reason)
                    ending = schemas.EventDelta(stop_reason=reason, stop_sequence=sequence)
        for event in self._end():
            yield event
        yield schemas.MessageEvent(type="message_delta", delta=ending, usage=usage)
        yield schemas.MessageEvent(type="message_stop")

    def _of_choice(self, choice: ChatChunkChoice) -> Iterator[schemas.MessageEvent]:
        delta = choice.delta
        if isinstance(delta.reasoning_content, str):
            if not isinstance(self._open, schemas.ThinkingBlock):
                yield from self._begin(schemas.ThinkingBlock(thinking=""))
            yield self._delta(schemas.EventDelta(type="thinking_delta", thinking=delta.reasoning_content))
        if isinstance(delta.content, str) and delta.content:
            if not isinstance(self._open, schemas.TextBlock):
                yield from self._begin(schemas.TextBlock(text=""))
            yield self._delta(schemas.EventDelta(type="text_delta", text=delta.content))
        for call in delta.tool_calls or []:
            yield from self._call(call)

    def _call(self, call: ToolCallDelta) -> Iterator[schemas.MessageEvent]:
        if isinstance(call.id, str):
            yield from self._begin(schemas.ToolUseBlock(id=call.id, name=call.function.name or "", input={}))
        if call.function.arguments:
            yield self._delta(schemas.EventDelta(type="input_json_delta", partial_json=call.function.arguments))

    def _begin(self, block: schemas.OutputBlock) -> Iterator[schemas.MessageEvent]:
        yield from self._end()
        self._open, self._index = block, self._index + 1
        yield schemas.MessageEvent(type="content_block_start", index=self._index, content_block=block)

    def _end(self) -> Iterator[schemas.MessageEvent]:
        if self._open is not None:
            self._open = None
            yield schemas.MessageEvent(type="content_block_stop", index=self._index)

    def _delta(self, delta: schemas.EventDelta) -> schemas.MessageEvent:
        return schemas.MessageEvent(type="content_block_delta", index=self._index, delta=delta)
