"""`/tokenize`, `/detokenize`, `/tokenizer_info` and `/version`: what clients need to count and cut texts themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from coserve import __version__
from coserve.api.answers import answer
from coserve.api.intake import Intake
from coserve.api.openai_requests import adapter_of, message_of
from coserve.api.openai_schemas import MAX_MESSAGES, ModelName, OpenAIMessage
from coserve.api.prompts import chat_messages, encode_text
from coserve.api.service import Service
from coserve.errors import InvalidRequest, QueueFull
from coserve.schemas import TokenId
from coserve.types import Wire

MAX_CHARACTERS = 4 << 20
MAX_TOKENS = 1 << 20
MAX_AT_ONCE = 64
"""Texts that are being cut at one time; more get 429."""


class TokenizeRequest(Wire, frozen=True):
    """`POST /tokenize`. One of `prompt` and `messages`. A text may be longer than the context."""

    prompt: Annotated[str, Meta(max_length=MAX_CHARACTERS)] | None = None
    messages: Annotated[list[OpenAIMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    model: ModelName | None = None
    """The base or an adapter: they share the tokenizer."""
    add_special_tokens: bool | None = None
    """What the base expects before a text; null: yes for a prompt. A chat's template says so itself."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(Wire, frozen=True):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeRequest(Wire, frozen=True):
    """`POST /detokenize`. Special tokens are part of the text."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
    model: ModelName | None = None


class DetokenizeResponse(Wire, frozen=True):
    prompt: str


class TokenizerInfo(Wire, frozen=True):
    """As a `tokenizer_config.json` has it."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


class Version(Wire, frozen=True):
    version: str


class Tokenization:
    """One method a route."""

    def __init__(self, service: Service, intake: Intake) -> None:
        self._service, self._intake = service, intake
        self._running = 0

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        body = await self._intake.dialect(request, TokenizeRequest)
        spec = self._service.engine.spec
        adapter_of(body.model, spec)
        with self._place():
            ids = await self._encode(body)
            strings: list[str] | UnsetType = UNSET
            if body.return_token_strs:
                strings = await asyncio.to_thread(lambda: [self._service.tokenizer.token(id) for id in ids])
        return answer(TokenizeResponse(tokens=ids, count=len(ids), max_model_len=spec.context, token_strs=strings))

    async def _encode(self, body: TokenizeRequest) -> list[int]:
        tokenizer = self._service.tokenizer
        if (body.prompt is None) == (body.messages is None):
            got = "none" if body.prompt is None else "both"
            raise InvalidRequest(f"expected one of prompt and messages, got {got}", field="prompt")
        if body.prompt is not None:
            return await encode_text(body.prompt, tokenizer, add_special=body.add_special_tokens is not False)
        if body.add_special_tokens:
            raise InvalidRequest("expected it left out with messages", field="add_special_tokens")
        turns = [message_of(message) for message in body.messages or []]
        if sum(len(turn.content) for turn in turns) > MAX_CHARACTERS:
            raise InvalidRequest(f"expected at most {MAX_CHARACTERS} characters", field="messages")
        return await asyncio.to_thread(
            tokenizer.chat,
            chat_messages(turns),
            add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
            continue_final=body.continue_final_message or False,
        )

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        body = await self._intake.dialect(request, DetokenizeRequest)
        spec = self._service.engine.spec
        adapter_of(body.model, spec)
        if body.tokens and max(body.tokens) >= spec.vocab:
            raise InvalidRequest(f"expected token ids below {spec.vocab}, got {max(body.tokens)}", field="tokens")
        with self._place():
            text = await asyncio.to_thread(self._service.tokenizer.decode, body.tokens, skip_special=False)
        return answer(DetokenizeResponse(prompt=text))

    @contextmanager
    def _place(self) -> Iterator[None]:
        """Texts wait for a thread, in memory: there is a limit to that."""
        if self._running >= MAX_AT_ONCE:
            raise QueueFull(f"{MAX_AT_ONCE} texts are being tokenised already")
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    async def tokenizer_info(self, request: web.Request) -> web.StreamResponse:
        tokenizer, special = self._service.tokenizer, self._service.tokenizer.special_tokens
        return answer(
            TokenizerInfo(
                tokenizer_class="PreTrainedTokenizerFast",
                vocab_size=tokenizer.vocab_size,
                model_max_length=self._service.engine.spec.context,
                bos_token=special.get("bos_token"),
                eos_token=special.get("eos_token"),
                pad_token=special.get("pad_token"),
                unk_token=special.get("unk_token"),
                chat_template=tokenizer.chat_template,
            )
        )

    async def version(self, request: web.Request) -> web.StreamResponse:
        return answer(Version(version=__version__))
