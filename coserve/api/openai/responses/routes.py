"""The routes of `/v1/responses`."""

from __future__ import annotations

from coserve.api.http.route import BODY_ERRORS, BUSY, Route
from coserve.api.openai.errors import openai_route
from coserve.api.openai.responses.handlers import ResponsesApi
from coserve.api.openai.responses.schemas import Response, ResponseEvent, ResponseRequest


def response_routes(api: ResponsesApi) -> tuple[Route, ...]:
    return (
        openai_route(
            "POST",
            "/v1/responses",
            api.create_response,
            "Answer, as OpenAI's responses do; nothing is stored",
            body=ResponseRequest,
            response=Response,
            events=ResponseEvent,
            errors=(404, 422, *BODY_ERRORS, BUSY),
        ),
    )
