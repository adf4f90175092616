"""How the requests of a batch are answered, by endpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from coserve.api.http.bodies import BodyReader
from coserve.api.http.json_blocks import encode_json
from coserve.api.openai.batches.runner import Answer
from coserve.api.openai.handlers import OpenAIApi
from coserve.api.openai.responses.handlers import ResponsesApi
from coserve.api.openai.responses.schemas import Response, ResponseRequest
from coserve.api.openai.schemas import ChatRequest, CompletionRequest
from coserve.core.errors import InvalidRequest

RequestT = TypeVar("RequestT", CompletionRequest, ChatRequest, ResponseRequest)


def batch_answers(api: OpenAIApi, responses: ResponsesApi, bodies: BodyReader) -> dict[str, Answer]:
    """Return the function that answers a body, by endpoint."""

    async def respond(body: ResponseRequest) -> Response:
        return await responses.answer(msgspec.structs.replace(body, store=False))  # its file has them

    return {
        "/v1/chat/completions": _answer(bodies, ChatRequest, api.answer_chat),
        "/v1/completions": _answer(bodies, CompletionRequest, api.answer_completion),
        "/v1/responses": _answer(bodies, ResponseRequest, respond),
    }


def _answer(bodies: BodyReader, kind: type[RequestT], of: Callable[[RequestT], Awaitable[msgspec.Struct]]) -> Answer:
    async def answer(content: bytes) -> bytes:
        body = await bodies.decode(content, kind, dialect=True)
        if body.stream:
            raise InvalidRequest("expected it left out in a batch", field="stream")
        if body.slo_class is None and body.service_tier is None:
            body = msgspec.structs.replace(body, slo_class="batch")
        return b"".join(encode_json(await of(body)))

    return answer
