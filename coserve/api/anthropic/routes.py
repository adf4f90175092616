"""The routes of `/v1/messages`."""

from __future__ import annotations

from coserve.api.anthropic.handlers import ANTHROPIC_ERRORS, AnthropicApi
from coserve.api.anthropic.schemas import (
    CountTokensRequest,
    Message,
    MessageEvent,
    MessagesRequest,
    TokenCountResponse,
)
from coserve.api.http.route import BODY_ERRORS, BUSY, Route


def message_routes(api: AnthropicApi) -> tuple[Route, ...]:
    return (
        Route(
            "POST",
            "/v1/messages",
            api.create_message,
            "Answer, as Anthropic's messages do",
            body=MessagesRequest,
            response=Message,
            events=MessageEvent,
            errors=(404, 422, *BODY_ERRORS, BUSY),
            error_formats=(ANTHROPIC_ERRORS,),
        ),
        Route(
            "POST",
            "/v1/messages/count_tokens",
            api.count_message_tokens,
            "Count the tokens of a prompt, as Anthropic's messages do",
            body=CountTokensRequest,
            response=TokenCountResponse,
            errors=(404, *BODY_ERRORS, BUSY),
            error_formats=(ANTHROPIC_ERRORS,),
        ),
    )
