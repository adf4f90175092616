"""The handlers of the OpenAI endpoints: translate the request, run it, translate the response."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web

from coserve.api.answers.families import forced_family, tool_family
from coserve.api.answers.parser import AnswerFormat, AnswerParsers, thinks
from coserve.api.answers.typed_arguments import schemas_of
from coserve.api.generation.async_tokenizer import check_tokens
from coserve.api.generation.full_response import collect
from coserve.api.generation.merge import gather, merge_streams
from coserve.api.generation.output_grammar import has_format, is_constrained
from coserve.api.generation.prompt_group import PromptGroup
from coserve.api.generation.prompts import encode_prompt
from coserve.api.http.bodies import BodyReader
from coserve.api.http.parsing import decode_dialect
from coserve.api.http.responses import json_response
from coserve.api.http.sse import event_response
from coserve.api.openai import schemas
from coserve.api.openai.chat import ChatLogprobsBuilder, chat_completion, chat_events
from coserve.api.openai.completions import CompletionLogprobsBuilder, completion, completion_events
from coserve.api.openai.errors import openai_error, openai_route
from coserve.api.openai.requests import PLACEHOLDER_MODELS, chat_request, completion_requests
from coserve.api.openai.tool_choice import naming_fields, with_allowed_tools, without_format
from coserve.api.openai.usage import ResponseMeta, new_meta
from coserve.api.service import Service
from coserve.config import Config
from coserve.core.errors import AdapterNotFound, InvalidRequest, PromptTooLong
from coserve.core.sampling import SamplingDefaults
from coserve.core.schemas.generation import GenerateChunk, GenerateRequest
from coserve.core.schemas.service import STREAM_END

RequestT = TypeVar("RequestT", bound=schemas.SharedParams)
_generates = partial(openai_route, "POST", stream_end=True, errors=(404, 422))


class OpenAIApi:
    def __init__(self, service: Service, config: Config, bodies: BodyReader) -> None:
        self._service, self._config, self._bodies = service, config, bodies

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        return self._service.sampling_defaults

    @property
    def chat_template(self) -> str | None:
        return self._service.tokenizer.chat_template

    @_generates(
        "/v1/completions",
        "Generate text, as OpenAI and vLLM do",
        response=schemas.Completion,
        events=schemas.Completion,
    )
    async def completions(self, request: web.Request, body: schemas.CompletionRequest) -> web.StreamResponse:
        if not body.stream:
            return json_response(await self.answer_completion(body))
        return await event_response(request, self._completion_chunks(body), openai_error, last=STREAM_END)

    @_generates(
        "/v1/chat/completions",
        "Continue a chat, as OpenAI and vLLM do",
        response=schemas.ChatCompletion,
        events=schemas.ChatChunk,
    )
    async def chat_completions(self, request: web.Request, body: schemas.ChatRequest) -> web.StreamResponse:
        if not body.stream:
            return json_response(await self.answer_chat(body))
        return await event_response(request, self.chat_chunks(body), openai_error, last=STREAM_END)

    async def answer_completion(self, body: schemas.CompletionRequest) -> schemas.Completion:
        """Return the whole answer. Raises as `InFlightRequests.stream`."""
        body, requests, echoes = await self._prepare_completion(body)
        stream = partial(self._service.generation.stream, group=PromptGroup(len(requests)))
        new = partial(CompletionLogprobsBuilder, body)
        responses = await gather([collect(each, stream(each), new) for each in requests])
        return await completion(body, self._meta("cmpl", body), echoes, responses)

    async def _completion_chunks(self, body: schemas.CompletionRequest) -> AsyncGenerator[schemas.Completion, None]:
        body, requests, echoes = await self._prepare_completion(body)
        stream = partial(self._service.generation.stream, group=PromptGroup(len(requests)))
        async with aclosing(merge_streams([partial(stream, each) for each in requests])) as chunks:
            async for event in completion_events(body, self._meta("cmpl", body), echoes, chunks):
                yield event

    async def answer_chat(self, body: schemas.ChatRequest) -> schemas.ChatCompletion:
        """Return the whole answer. Raises as `InFlightRequests.stream`."""
        body, native, parsers = await self._prepare_chat(body)
        new = partial(ChatLogprobsBuilder, body, self._service.tokenizer.vocabulary)
        stream = self._stream_chat(native, parsers)
        with naming_fields(body):
            found = await collect(native, stream, new)
        return await chat_completion(body, self._meta("chatcmpl", body), parsers, found)

    async def chat_chunks(self, body: schemas.ChatRequest) -> AsyncGenerator[schemas.ChatChunk, None]:
        """Yield the events of the answer. Raises as `InFlightRequests.stream`."""
        body, native, parsers = await self._prepare_chat(body)
        meta, vocabulary = self._meta("chatcmpl", body), self._service.tokenizer.vocabulary
        async with aclosing(self._stream_chat(native, parsers)) as chunks:
            with naming_fields(body):
                async for event in chat_events(body, meta, vocabulary, parsers, chunks):
                    yield event

    def _stream_chat(self, native: GenerateRequest, parsers: AnswerParsers) -> AsyncGenerator[GenerateChunk, None]:
        stream = self._service.generation.stream
        return stream(native, read_prompt=parsers.read_prompt, calls=parsers.format.calls)

    async def fits(self, body: schemas.ChatRequest) -> bool:
        """Return whether the context has room for the prompt. Raises `InvalidRequest`, also from the chat template."""
        try:
            return await self.prompt_tokens(body) < self._service.engine.spec.context
        except PromptTooLong:
            return False

    async def prompt_tokens(self, body: schemas.ChatRequest) -> int:
        """Return the tokens of the prompt, which may be more than the context. Raises `InvalidRequest`, also from the
        chat template, and `PromptTooLong` for a prompt too long to count."""
        _, native, _ = await self._prepare_chat(body)
        try:
            return len(await encode_prompt(native, self._service.engine.spec, self._service.texts))
        except PromptTooLong as error:
            if error.length is None:
                raise
            return error.length

    async def _prepare_completion(
        self, body: schemas.CompletionRequest
    ) -> tuple[schemas.CompletionRequest, list[GenerateRequest], list[str]]:
        body = self.sampling_defaults.fill(await self._resolve_placeholder(body))
        requests = completion_requests(body, self._service.engine.spec, self._config.max_queue)
        return body, requests, [await self._echo(body, each) for each in requests]

    async def _prepare_chat(
        self, body: schemas.ChatRequest
    ) -> tuple[schemas.ChatRequest, GenerateRequest, AnswerParsers]:
        body = self.sampling_defaults.fill(await self._resolve_placeholder(body))
        body = without_format(with_allowed_tools(body))
        native = chat_request(body, self._service.engine.spec, self.chat_template)
        parsers = AnswerParsers(self._answer_format(body, native), self._service.tokenizer)
        return body, parsers.format.prepared(native), parsers

    @_generates(
        "/invocations",
        "Answer a body of `/v1/chat/completions` or `/v1/completions`: SageMaker's path",
        body=(schemas.ChatRequest, schemas.CompletionRequest),
        response=(schemas.ChatCompletion, schemas.Completion),
        events=(schemas.ChatChunk, schemas.Completion),
    )
    async def invoke(self, request: web.Request) -> web.StreamResponse:
        """Answer as vLLM does: the body says whether it is a chat or a completion."""
        body = await self._bodies.read(request, decode_invocation)
        if isinstance(body, schemas.ChatRequest):
            return await self.chat_completions(request, body)
        return await self.completions(request, body)

    def _answer_format(self, body: schemas.ChatRequest, native: GenerateRequest) -> AnswerFormat:
        template = self.chat_template
        family = tool_family(template, self._config.tool_parser)
        tools = [] if body.tool_choice == "none" else body.tools or []
        if is_constrained(native) and not is_constrained(body):
            return AnswerFormat(forced_family(family), thinks=False)
        auto, parallel = self._config.tool_parser == "auto", body.parallel_tool_calls is not False
        if tools and family is None and auto and template is not None and "tools" not in template:
            raise InvalidRequest(
                "the base's chat template does not show them to the model; with tool_choice required, or a function's "
                "name, the answer is a call all the same",
                field="tools",
            )
        if is_constrained(body):  # the text has no reasoning
            if not has_format(body) or family is None or not tools:
                return AnswerFormat(None, thinks=False)
            known = schemas_of(tools)
            return AnswerFormat(family, thinks=False, parallel=parallel, schemas=known, calls=family.starts(known))
        return AnswerFormat(
            family if tools or (family is not None and family.channels) else None,
            thinks=thinks(template),
            parallel=parallel,
            shows_reasoning=body.include_reasoning,
            schemas=schemas_of(tools),
        )

    async def _resolve_placeholder(self, body: RequestT) -> RequestT:
        """Return the request with model null if its name is a placeholder, unless an adapter has that name."""
        if body.model in PLACEHOLDER_MODELS:
            try:
                await self._service.adapters.get(body.model, None)
            except AdapterNotFound:
                return msgspec.structs.replace(body, model=None)
        return body

    def _meta(self, kind: str, body: schemas.SharedParams) -> ResponseMeta:
        return new_meta(kind, body.model, self._service.engine.spec)

    async def _echo(self, body: schemas.CompletionRequest, native: GenerateRequest) -> str:
        """Return the prompt's text for `echo`; empty without it. Raises `PromptTooLong`."""
        if not body.echo or native.prompt is None:
            return ""
        if isinstance(native.prompt, str):
            return native.prompt
        check_tokens(len(native.prompt), self._service.engine.spec.context, "prompt")  # before it is decoded
        return await self._service.texts.decode(native.prompt, skip_special=native.skip_special_tokens)


class _Probe(msgspec.Struct):
    messages: msgspec.Raw = msgspec.Raw(b"null")


def decode_invocation(content: bytes) -> schemas.ChatRequest | schemas.CompletionRequest:
    """Decode a chat, which has `messages`, or a completion."""
    if b'"messages"' in content and bytes(decode_dialect(content, _Probe).messages) != b"null":
        return decode_dialect(content, schemas.ChatRequest)
    return decode_dialect(content, schemas.CompletionRequest)
