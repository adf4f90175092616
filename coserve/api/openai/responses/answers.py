"""Translates chat completions into answers of `/v1/responses`, whole and as events."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET

from coserve.api.openai.errors import openai_error
from coserve.api.openai.responses import schemas
from coserve.api.openai.schemas import ChatChunk, ChatCompletion, ChatFinish, ChatLogprob, ToolCallDelta
from coserve.core.errors import CoserveError
from coserve.core.schemas.generation import Usage


def response(body: schemas.ResponseRequest, chat: ChatCompletion) -> schemas.Response:
    (choice,) = chat.choices
    answer, logprobs = choice.message, [] if choice.logprobs is None else choice.logprobs.content
    output: list[schemas.OutputItem] = []
    if isinstance(answer.reasoning_content, str):
        output.append(_reasoning(new_id("rs"), answer.reasoning_content))
    calls = answer.tool_calls or []
    if answer.content or not calls:
        output.append(_message(new_id("msg"), answer.content or "", logprobs))
    output += [
        schemas.CallItem(new_id("fc"), call.id, call.function.name, call.function.arguments, "completed")
        for call in calls
    ]
    return _ended(new_response(body, chat.model, chat.created), output, choice.finish_reason, chat.usage)


def new_response(body: schemas.ResponseRequest, model: str, created: int) -> schemas.Response:
    """Return the response as the first event shows it."""
    return schemas.Response(
        id=new_id("resp"),
        created_at=created,
        model=model,
        status="in_progress",
        output=[],
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        tools=body.tools or [],
        tool_choice=body.tool_choice or "auto",
        parallel_tool_calls=body.parallel_tool_calls is not False,
        text=body.text or schemas.TextOptions(),
        metadata=body.metadata or {},
        truncation=body.truncation or "disabled",
        store=body.store is not False,
        previous_response_id=body.previous_response_id or None,
    )


def _ended(
    begun: schemas.Response, output: list[schemas.OutputItem], finish: ChatFinish | None, usage: Usage | None
) -> schemas.Response:
    cut = finish == "length"
    if cut and output:
        output = [*output[:-1], msgspec.structs.replace(output[-1], status="incomplete")]
    return msgspec.structs.replace(
        begun,
        status="incomplete" if cut else "completed",
        output=output,
        incomplete_details=schemas.IncompleteDetails() if cut else None,
        usage=None
        if usage is None
        else schemas.ResponseUsage(
            usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, usage.prompt_tokens_details
        ),
    )


def new_id(kind: str) -> str:
    """Return a new id, such as `msg_` with hex digits."""
    return f"{kind}_{secrets.token_hex(16)}"


def _message(
    id: str, text: str, logprobs: list[ChatLogprob], status: schemas.Status = "completed"
) -> schemas.MessageItem:
    return schemas.MessageItem(id, [schemas.OutputText(text, logprobs=logprobs)], status)


def _reasoning(id: str, text: str) -> schemas.ReasoningItem:
    return schemas.ReasoningItem(id, [schemas.ReasoningText(text)], "completed")


@dataclass
class _Open:
    """The item that a stream is writing."""

    index: int
    item: schemas.OutputItem
    """The item as it was first sent."""
    texts: list[str] = field(default_factory=list)
    logprobs: list[ChatLogprob] = field(default_factory=list)

    def done(self, status: schemas.Status) -> schemas.OutputItem:
        text = "".join(self.texts)
        match self.item:
            case schemas.MessageItem(id=id):
                return _message(id, text, self.logprobs, status)
            case schemas.ReasoningItem(id=id):
                return schemas.ReasoningItem(id, [schemas.ReasoningText(text)], status)
            case schemas.CallItem() as call:
                return msgspec.structs.replace(call, arguments=text, status=status)


class ResponseEvents:
    """Turns the chunks of a chat into events."""

    def __init__(self, body: schemas.ResponseRequest) -> None:
        self._body, self._number = body, 0
        self._output: list[schemas.OutputItem] = []
        self._open: _Open | None = None

    async def of(self, chunks: AsyncGenerator[ChatChunk, None]) -> AsyncGenerator[schemas.ResponseEvent, None]:
        """Yield the events. An error before the first chunk is raised; a later one is the event `response.failed`."""
        begun: schemas.Response | None = None
        finish: ChatFinish | None = None
        usage: Usage | None = None
        scores: list[ChatLogprob] = []  # of tokens that are parts of a character, whose text comes later
        try:
            async for chunk in chunks:
                if begun is None:
                    begun = new_response(self._body, chunk.model, chunk.created)
                    yield self._event("created", response=begun)
                    yield self._event("in_progress", response=begun)
                if isinstance(chunk.usage, Usage):
                    usage = chunk.usage
                for choice in chunk.choices:
                    finish = choice.finish_reason or finish
                    delta = choice.delta
                    scores += [] if choice.logprobs is None else choice.logprobs.content
                    if isinstance(delta.reasoning_content, str):
                        for event in self._text(schemas.ReasoningItem, delta.reasoning_content, []):
                            yield event
                    if isinstance(delta.content, str) and delta.content:
                        for event in self._text(schemas.MessageItem, delta.content, scores):
                            yield event
                        scores = []
                    for call in delta.tool_calls or []:
                        for event in self._call(call):
                            yield event
        except CoserveError as error:
            if begun is None:
                raise
            info = openai_error(error).error
            failed = msgspec.structs.replace(
                begun, status="failed", error=schemas.ResponseError(info.code, info.message)
            )
            yield self._event("failed", response=failed)
            return
        assert begun is not None, "a stream has a chunk"
        if self._open is None and not self._output:
            for event in self._begin(schemas.MessageItem(new_id("msg"), [], "in_progress")):
                yield event
        if scores and self._open is not None and isinstance(self._open.item, schemas.MessageItem):
            for event in self._text(schemas.MessageItem, "", scores):
                yield event
        for event in self._end("incomplete" if finish == "length" else "completed"):
            yield event
        ended = _ended(begun, self._output, finish, usage)
        yield self._event(ended.status, response=ended)

    def _text(
        self, kind: type[schemas.MessageItem | schemas.ReasoningItem], text: str, logprobs: list[ChatLogprob]
    ) -> Iterator[schemas.ResponseEvent]:
        if self._open is None or not isinstance(self._open.item, kind):
            yield from self._begin(kind(new_id("msg" if kind is schemas.MessageItem else "rs"), [], "in_progress"))
        assert self._open is not None, "an item was begun"
        self._open.texts.append(text)
        self._open.logprobs += logprobs
        scores = logprobs if kind is schemas.MessageItem else UNSET
        yield self._of_open(f"{_part_name(self._open.item)}.delta", content_index=0, delta=text, logprobs=scores)

    def _call(self, call: ToolCallDelta) -> Iterator[schemas.ResponseEvent]:
        if isinstance(call.id, str):
            name = call.function.name or ""
            yield from self._begin(schemas.CallItem(new_id("fc"), call.id, name, "", "in_progress"))
        assert self._open is not None, "a call was begun"
        if call.function.arguments:
            self._open.texts.append(call.function.arguments)
            yield self._of_open("function_call_arguments.delta", delta=call.function.arguments)

    def _begin(self, item: schemas.OutputItem) -> Iterator[schemas.ResponseEvent]:
        yield from self._end()
        self._open = _Open(len(self._output), item)
        yield self._event("output_item.added", output_index=self._open.index, item=item)
        if not isinstance(item, schemas.CallItem):
            empty = schemas.OutputText("") if isinstance(item, schemas.MessageItem) else schemas.ReasoningText("")
            yield self._of_open("content_part.added", content_index=0, part=empty)

    def _end(self, status: schemas.Status = "completed") -> Iterator[schemas.ResponseEvent]:
        """End the open item, if there is one."""
        if self._open is None:
            return
        done = self._open.done(status)
        if isinstance(done, schemas.CallItem):
            yield self._of_open("function_call_arguments.done", name=done.name, arguments=done.arguments)
        else:
            part = done.content[0]
            scores = part.logprobs if isinstance(part, schemas.OutputText) else UNSET
            yield self._of_open(f"{_part_name(done)}.done", content_index=0, text=part.text, logprobs=scores)
            yield self._of_open("content_part.done", content_index=0, part=part)
        yield self._event("output_item.done", output_index=self._open.index, item=done)
        self._output.append(done)
        self._open = None

    def _of_open(self, type: str, **fields: Any) -> schemas.ResponseEvent:  # noqa: ANN401 - those of the struct
        """Return an event about the open item."""
        assert self._open is not None, "an item is open"
        return self._event(type, output_index=self._open.index, item_id=self._open.item.id, **fields)

    def _event(self, type: str, **fields: Any) -> schemas.ResponseEvent:  # noqa: ANN401 - those of the struct
        self._number += 1
        return schemas.ResponseEvent(type=f"response.{type}", sequence_number=self._number - 1, **fields)


def _part_name(item: schemas.OutputItem) -> str:
    return "output_text" if isinstance(item, schemas.MessageItem) else "reasoning_text"
