"""The handlers of `/v1/messages`, which are translated to chat completions. Errors have Anthropic's format and
names."""

from __future__ import annotations

import msgspec
from aiohttp import web

from coserve.api.anthropic import schemas
from coserve.api.anthropic.answers import MessageEvents, message
from coserve.api.anthropic.requests import chat_of, template_chat
from coserve.api.http.parsing import decode_dialect
from coserve.api.http.responses import ErrorFormat, json_response
from coserve.api.http.route import Route
from coserve.api.http.sse import event_response
from coserve.api.openai.errors import openai_error
from coserve.api.openai.handlers import OpenAIApi
from coserve.api.openai.requests import adapter_of
from coserve.api.tokenizer.handlers import BaseLimits, TokenizerApi, template_ids
from coserve.core.errors import CoserveError, PromptTooLong
from coserve.data.offload.protocol import TaskContext

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's types of errors by status; others below 500 are `invalid_request_error`, above `api_error`."""


_PARAMS = {"adapter": "model", "max_completion_tokens": "max_tokens"}
"""Names of the fields that errors of the chat name."""


def anthropic_error(error: CoserveError) -> schemas.AnthropicError:
    """Return the error as `{"type": "error", "error": {"type", "message"}}`."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    text = openai_error(error, _PARAMS).error.message
    if isinstance(error, PromptTooLong) and error.length is not None and error.context is not None:
        text = f"prompt is too long: {error.length} tokens > {error.context - 1} maximum"  # clients parse it
    return schemas.AnthropicError(schemas.AnthropicErrorInfo(kind, text))


ANTHROPIC_ERRORS = ErrorFormat(schemas.AnthropicError, anthropic_error)


class AnthropicApi:
    def __init__(self, api: OpenAIApi, tokenizer: TokenizerApi) -> None:
        self._api, self._tokenizer = api, tokenizer

    @Route(
        "POST",
        "/v1/messages",
        "Answer, as Anthropic's messages do",
        dialect=True,
        response=schemas.Message,
        events=schemas.MessageEvent,
        errors=(404, 422),
        error_formats=(ANTHROPIC_ERRORS,),
    )
    async def create_message(self, request: web.Request, body: schemas.MessagesRequest) -> web.StreamResponse:
        chat = chat_of(body, self._api.chat_template)
        if not body.stream:
            return json_response(message(await self._api.answer_chat(chat)))
        events, event_of = MessageEvents().of(self._api.chat_chunks(chat)), lambda event: event.type
        return await event_response(request, events, anthropic_error, error_event="error", event_of=event_of)

    @Route(
        "POST",
        "/v1/messages/count_tokens",
        "Count the tokens of a prompt, as Anthropic's messages do",
        body=schemas.CountTokensRequest,
        response=schemas.TokenCountResponse,
        errors=(404,),
        error_formats=(ANTHROPIC_ERRORS,),
    )
    async def count_message_tokens(self, request: web.Request) -> web.StreamResponse:
        return await self._tokenizer.answer(request, count_tokens)


def count_tokens(context: TaskContext, base: BaseLimits, body: bytes) -> tuple[bytes, str | None]:
    """Helper task of `POST /v1/messages/count_tokens`: see `TextTask`."""
    request = decode_dialect(body, schemas.CountTokensRequest)
    adapter = adapter_of(request.model, base.name)
    ids = template_ids(context.tokenizer, template_chat(request, context.tokenizer.chat_template))
    return msgspec.json.encode(schemas.TokenCountResponse(input_tokens=len(ids))), adapter
