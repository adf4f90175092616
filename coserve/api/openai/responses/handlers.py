"""`/v1/responses`, which is translated to chat completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

import msgspec
from aiohttp import web

from coserve.api.http.responses import ErrorFormat, encoded_json, json_response
from coserve.api.http.route import PAGE
from coserve.api.http.sse import event_response
from coserve.api.openai.errors import openai_error, openai_route
from coserve.api.openai.handlers import OpenAIApi
from coserve.api.openai.lists import behind, in_order, list_query
from coserve.api.openai.responses import schemas
from coserve.api.openai.responses.answers import ResponseEvents, new_id, response
from coserve.api.openai.responses.requests import asking_for_summary, chat_of, later_starts
from coserve.api.openai.responses.store import ResponseStore, decoded, stored_items
from coserve.api.openai.schemas import ChatRequest, OpenAIError
from coserve.core.errors import InvalidRequest
from coserve.core.limits import PAGE_LIMIT

_PARAMS = {
    "adapter": "model",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}
"""Names of the fields that errors of the chat name."""


_error = partial(openai_error, params=_PARAMS)
_post = partial(openai_route, "POST", errors=(404, 422), error_formats=(ErrorFormat(OpenAIError, _error),))


class ResponsesApi:
    def __init__(self, api: OpenAIApi) -> None:
        self._api, self._store = api, ResponseStore()

    async def _truncated(self, body: schemas.ResponseRequest, chat: ChatRequest) -> ChatRequest:
        """Return the chat, with `truncation` auto without as many of its oldest messages as do not fit; whole if there
        is no room for any. Raises `InvalidRequest`, also from the chat template."""
        if body.truncation != "auto" or await self._api.fits(chat):
            return chat
        head, starts = later_starts(chat.messages)
        found, low, high = chat, 1, len(starts)
        while low < high:
            middle = (low + high) // 2
            messages = chat.messages[:head] + chat.messages[starts[middle] :]
            shorter = msgspec.structs.replace(chat, messages=messages)
            try:
                fits = await self._api.fits(shorter)
            except InvalidRequest:  # parts of an exchange without its question are no chat to many templates
                high = middle
            else:
                found, low, high = (shorter, low, middle) if fits else (found, middle + 1, high)
        return found

    @_post("/v1/responses", "Answer, as OpenAI's responses do", response=schemas.Response, events=schemas.ResponseEvent)
    async def create_response(self, request: web.Request, body: schemas.ResponseRequest) -> web.StreamResponse:
        if not body.stream:
            return json_response(await self.answer(body))
        body = self._complete(body)
        before, chat = await self._chat(body)
        events = self._stored(body, before, ResponseEvents(body).of(self._api.chat_chunks(chat)))
        return await event_response(request, events, _error, event_of=lambda event: event.type)

    @_post("/v1/responses/input_tokens", "Count the tokens of a response's prompt")
    async def count_input_tokens(self, body: schemas.ResponseRequest) -> schemas.InputTokens:
        _, chat = await self._chat(self._complete(body))
        return schemas.InputTokens(input_tokens=await self._api.prompt_tokens(chat))

    @_post(
        "/v1/responses/compact",
        "Make a conversation shorter: its summary replaces all but the messages to the assistant",
    )
    async def compact(self, body: schemas.CompactRequest) -> schemas.CompactedResponse:
        plain = msgspec.structs.replace(
            self._complete(body),
            stream=False,
            text=None,
            structured_outputs=None,
            tool_choice="none",
            include=None,
            top_logprobs=None,
        )
        before, chat = await self._chat(plain, summary=True)
        found = response(plain, await self._api.answer_chat(chat))
        texts = [part.text for item in found.output if isinstance(item, schemas.MessageItem) for part in item.content]
        if found.status != "completed":
            raise InvalidRequest("expected room for a whole summary, got a part", field="max_output_tokens")
        if not any(texts):
            raise InvalidRequest("expected a conversation that has a summary: the model wrote none", field="input")
        items = [*before, *stored_items(plain.input)]
        summary = schemas.StoredItem(id=new_id("cmp"), type="compaction", encrypted_content="".join(texts))
        return schemas.CompactedResponse(
            id=found.id,
            created_at=found.created_at,
            output=[*(one for one in items if one.type == "message" and one.role != "assistant"), summary],
            usage=found.usage,
        )

    async def answer(self, body: schemas.ResponseRequest) -> schemas.Response:
        """Return the whole response, and store it if `body` says so. Raises as `InFlightRequests.stream`."""
        body = self._complete(body)
        before, chat = await self._chat(body)
        found = response(body, await self._api.answer_chat(chat))
        self._keep(body, before, found)
        return found

    def _complete(self, body: schemas.ResponseRequest) -> schemas.ResponseRequest:
        """Return the request with the base's sampling defaults, and with the items that its input refers to. Raises
        `InvalidRequest`, `NotFound`."""
        body = self._api.sampling_defaults.fill(body)
        if isinstance(body.input, str):
            return body
        references = {place: one.id for place, one in enumerate(body.input) if one.type == "item_reference"}
        for place, id in references.items():
            if not isinstance(id, str):
                raise InvalidRequest("expected the id of an item of a stored response", field=f"input[{place}].id")
        found = iter(self._store.items(references))
        items = [next(found) if one.type == "item_reference" else one for one in body.input]
        return msgspec.structs.replace(body, input=items)

    async def _chat(
        self, body: schemas.ResponseRequest, *, summary: bool = False
    ) -> tuple[list[schemas.StoredItem], ChatRequest]:
        """Return the items of the previous responses, and the chat, or one that asks for its summary."""
        await asyncio.sleep(0)  # yield: each of these steps takes long for many items
        before = self._store.conversation(body.previous_response_id) if body.previous_response_id else []
        await asyncio.sleep(0)
        chat = chat_of(body, before)
        return before, await self._truncated(body, asking_for_summary(chat) if summary else chat)

    async def _stored(
        self,
        body: schemas.ResponseRequest,
        before: Sequence[schemas.StoredItem],
        events: AsyncGenerator[schemas.ResponseEvent, None],
    ) -> AsyncGenerator[schemas.ResponseEvent, None]:
        """Yield the events; the response is stored before its last one."""
        async with aclosing(events):
            async for event in events:
                if isinstance(event.response, schemas.Response) and event.response.status != "in_progress":
                    self._keep(body, before, event.response)
                yield event

    def _keep(
        self, body: schemas.ResponseRequest, before: Sequence[schemas.StoredItem], found: schemas.Response
    ) -> None:
        if found.store:
            self._store.add(found, before, stored_items(body.input))

    @openai_route("GET", "/v1/responses/{id}", "Show a stored response", response=schemas.Response)
    async def get_response(self, request: web.Request, id: str) -> web.StreamResponse:
        if request.query.get("stream", "false") != "false":
            raise InvalidRequest("a stored response is not streamed again: expected it left out", field="stream")
        return encoded_json(self._store.get(id))

    @openai_route("DELETE", "/v1/responses/{id}", "Delete a stored response; those that continue it stay")
    async def delete_response(self, id: str) -> schemas.DeletedResponse:
        self._store.remove(id)
        return schemas.DeletedResponse(id=id)

    @openai_route(
        "GET", "/v1/responses/{id}/input_items", "List the items before a response's output", query=(*PAGE, "order")
    )
    async def list_input_items(self, request: web.Request, id: str) -> schemas.InputItemList:
        after, limit = list_query(request.query, ("order",), PAGE_LIMIT)
        items = behind(in_order(self._store.inputs(id), request.query), after)
        return schemas.InputItemList.of(decoded(items[:limit]), has_more=len(items) > limit)
