"""The handlers of the OpenAI endpoints: translate, ask, translate back."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web

from coserve.api.generation.collect import collect
from coserve.api.generation.merge import merged, together
from coserve.api.generation.texts import check_tokens
from coserve.api.http.answers import answer
from coserve.api.http.intake import Intake
from coserve.api.http.sse import EventStream
from coserve.api.openai.chat import ChatScores, chat_completion, chat_events
from coserve.api.openai.completions import CompletionScores, completion, completion_events, name_of
from coserve.api.openai.errors import openai_error
from coserve.api.openai.models import get_model, list_models
from coserve.api.openai.requests import chat_request, completion_requests
from coserve.api.openai.schemas import Ask, ChatRequest, CompletionRequest
from coserve.api.openai.usage import Head, new_head
from coserve.api.service import Service
from coserve.config import Config
from coserve.errors import AdapterNotFound, CoserveError
from coserve.schemas import STREAM_END, GenerateRequest

STAND_INS = ("tgi", "dummy")
"""What TGI's client and huggingface_hub's say for the one model that a server has."""

AskT = TypeVar("AskT", bound=Ask)


class OpenAIApi:
    """One method a route."""

    def __init__(self, service: Service, config: Config, intake: Intake) -> None:
        self._service, self._config, self._intake = service, config, intake

    async def completions(self, request: web.Request) -> web.StreamResponse:
        ask = await self._named(await self._intake.dialect(request, CompletionRequest))
        asked = completion_requests(ask, self._service.engine.spec)
        echoes = [await self._echo(ask, each) for each in asked]
        head = self._head("cmpl", ask)
        generation = self._service.generation
        if not ask.stream:
            new = partial(CompletionScores, name_of(ask))
            answers = await together([collect(each, generation.stream(each), new) for each in asked])
            return answer(await completion(ask, head, echoes, answers))
        async with aclosing(merged([partial(generation.stream, each) for each in asked])) as chunks:
            return await self._stream(request, completion_events(ask, head, echoes, chunks))

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        ask = await self._named(await self._intake.dialect(request, ChatRequest))
        asked = chat_request(ask, self._service.engine.spec)
        head = self._head("chatcmpl", ask)
        if not ask.stream:
            chunks = self._service.generation.stream(asked)
            return answer(chat_completion(ask, head, await collect(asked, chunks, partial(ChatScores, ask))))
        async with aclosing(self._service.generation.stream(asked)) as chunks:
            return await self._stream(request, chat_events(ask, head, chunks))

    async def list_models(self, request: web.Request) -> web.StreamResponse:
        return answer(await list_models(self._service))

    async def get_model(self, request: web.Request) -> web.StreamResponse:
        return answer(await get_model(self._service, request.match_info["id"]))

    async def _named(self, ask: AskT) -> AskT:
        """The request with null for a model's name that stands for the base, unless an adapter is called so."""
        if ask.model in STAND_INS:
            try:
                await self._service.adapters.get(ask.model, None)
            except AdapterNotFound:
                return msgspec.structs.replace(ask, model=None)
        return ask

    def _head(self, kind: str, ask: Ask) -> Head:
        return new_head(kind, ask.model, self._service.engine.spec)

    async def _echo(self, ask: CompletionRequest, asked: GenerateRequest) -> str:
        """The text before the answer's own. Raises `PromptTooLong`."""
        if not ask.echo or asked.prompt is None:
            return ""
        if isinstance(asked.prompt, str):
            return asked.prompt
        check_tokens(len(asked.prompt), self._service.engine.spec.context, "prompt")  # before it is decoded
        return await self._service.texts.decode(asked.prompt, skip_special=asked.skip_special_tokens)

    async def _stream(self, request: web.Request, events: AsyncGenerator[msgspec.Struct, None]) -> web.StreamResponse:
        """Events, then `[DONE]`; an error after the first event is an event too."""
        stream = EventStream(request, write_timeout=self._config.read_timeout)
        async with aclosing(events):
            try:
                async for event in events:
                    await stream.send(event)
            except CoserveError as error:
                if not stream.begun:
                    raise
                await stream.send(openai_error(error))
        await stream.send(STREAM_END)
        return await stream.close()
