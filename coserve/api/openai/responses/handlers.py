"""`/v1/responses`, which is translated to chat completions."""

from __future__ import annotations

import msgspec
from aiohttp import web

from coserve.api.http.responses import ErrorFormat, json_response
from coserve.api.http.sse import EventStream
from coserve.api.openai.errors import openai_error, openai_route
from coserve.api.openai.handlers import OpenAIApi
from coserve.api.openai.responses.answers import ResponseEvents, response
from coserve.api.openai.responses.requests import chat_of, shortened
from coserve.api.openai.responses.schemas import Response, ResponseEvent, ResponseRequest
from coserve.api.openai.schemas import ChatRequest, OpenAIError
from coserve.core.errors import CoserveError, InvalidRequest

_PARAMS = {
    "adapter": "model",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}
"""Names of the fields that errors of the chat name."""


def _error(error: CoserveError) -> OpenAIError:
    return openai_error(error, _PARAMS)


class ResponsesApi:
    def __init__(self, api: OpenAIApi, *, write_timeout: float) -> None:
        self._api, self._write_timeout = api, write_timeout

    async def _truncated(self, body: ResponseRequest, chat: ChatRequest) -> ChatRequest:
        """Return the chat, with `truncation` auto without as many of its oldest messages as do not fit; whole if there
        is no room for any. Raises `InvalidRequest`, also from the chat template."""
        if body.truncation != "auto" or await self._api.fits(chat):
            return chat
        chats = [msgspec.structs.replace(chat, messages=messages) for messages in shortened(chat.messages)]
        found, low, high = chat, 1, len(chats)
        while low < high:
            middle = (low + high) // 2
            try:
                fits = await self._api.fits(chats[middle])
            except InvalidRequest:  # parts of an exchange without its question are no chat to many templates
                high = middle
            else:
                found, low, high = (chats[middle], low, middle) if fits else (found, middle + 1, high)
        return found

    @openai_route(
        "POST",
        "/v1/responses",
        "Answer, as OpenAI's responses do; nothing is stored",
        response=Response,
        events=ResponseEvent,
        errors=(404, 422),
        error_formats=(ErrorFormat(OpenAIError, _error),),
    )
    async def create_response(self, request: web.Request, body: ResponseRequest) -> web.StreamResponse:
        chat = await self._truncated(body, chat_of(body, self._api.chat_template))
        if not body.stream:
            return json_response(response(body, await self._api.answer_chat(chat)))
        stream = EventStream(request, write_timeout=self._write_timeout)
        await stream.send_all(
            ResponseEvents(body).of(self._api.chat_chunks(chat)), _error, event_of=lambda event: event.type
        )
        return await stream.close()
