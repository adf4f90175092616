"""SageMaker's `/invocations`, as vLLM has it: the body says whether it is a chat or a completion."""

from __future__ import annotations

import msgspec
from aiohttp import web

from coserve.api.http.bodies import BodyReader
from coserve.api.http.parsing import decode_dialect
from coserve.api.openai.errors import openai_route
from coserve.api.openai.handlers import OpenAIApi
from coserve.api.openai.schemas import ChatChunk, ChatCompletion, ChatRequest, Completion, CompletionRequest


class _Probe(msgspec.Struct):
    messages: msgspec.Raw = msgspec.Raw(b"null")


class InvocationsApi:
    def __init__(self, api: OpenAIApi, bodies: BodyReader) -> None:
        self._api, self._bodies = api, bodies

    @openai_route(
        "POST",
        "/invocations",
        "Answer a body of `/v1/chat/completions` or `/v1/completions`: SageMaker's path",
        body=(ChatRequest, CompletionRequest),
        response=(ChatCompletion, Completion),
        events=(ChatChunk, Completion),
        stream_end=True,
        errors=(404, 422),
    )
    async def invoke(self, request: web.Request) -> web.StreamResponse:
        body = await self._bodies.read(request, decode_invocation)
        if isinstance(body, ChatRequest):
            return await self._api.chat_completions(request, body)
        return await self._api.completions(request, body)


def decode_invocation(content: bytes) -> ChatRequest | CompletionRequest:
    """Decode a chat, which has `messages`, or a completion."""
    if b'"messages"' in content and bytes(decode_dialect(content, _Probe).messages) != b"null":
        return decode_dialect(content, ChatRequest)
    return decode_dialect(content, CompletionRequest)
