"""`/tokenize`, `/detokenize`, `/tokenizer_info` and `/version`, for clients that count or cut texts themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from coserve import __version__
from coserve.api.generation.async_tokenizer import chat_ids
from coserve.api.http.bodies import SMALL_BODY, BodyReader
from coserve.api.http.parsing import decode_dialect
from coserve.api.http.responses import encoded_json
from coserve.api.http.route import Route
from coserve.api.openai.errors import openai_route
from coserve.api.openai.models import find_model
from coserve.api.openai.requests import PLACEHOLDER_MODELS, adapter_of
from coserve.api.openai.schemas import ModelName
from coserve.api.service import Service
from coserve.core.errors import AdapterNotFound, InvalidRequest, QueueFull
from coserve.core.limits import MAX_MESSAGES, TokenIds
from coserve.core.messages import Chat, ChatMessage, TemplateOptions, Tools, characters
from coserve.core.types import Wire
from coserve.core.validation import above_vocabulary, check_one_given
from coserve.data.offload.protocol import TaskContext
from coserve.data.pretrained.tokenizer import Tokenizer

MAX_CHARACTERS = 4 << 20
MAX_TEXTS = 64


class TokenizeRequest(Wire, frozen=True):
    """`POST /tokenize`. One of `prompt` and `messages`. A text may be longer than the context."""

    prompt: Annotated[str, Meta(max_length=MAX_CHARACTERS)] | None = None
    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateOptions | None = None
    model: ModelName | None = None
    """The base or an adapter: they share the tokenizer."""
    add_special_tokens: bool | None = None
    """Whether to add the special tokens that the base expects before a text; null: yes for a prompt. A chat's template
    writes them itself."""
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

    tokens: TokenIds
    model: ModelName | None = None


class DetokenizeResponse(Wire, frozen=True):
    prompt: str


class TokenizerInfo(Wire, frozen=True):
    """The fields of `tokenizer_config.json`, as in vLLM's response."""

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


class TokenizerApi:
    """`max_texts`: most texts that are tokenised concurrently; further requests get 429."""

    def __init__(self, service: Service, bodies: BodyReader, *, max_texts: int = MAX_TEXTS) -> None:
        self._service, self._bodies, self._max_texts = service, bodies, max_texts
        self._running = 0

    @openai_route(
        "POST",
        "/tokenize",
        "Text or a chat to token ids",
        body=TokenizeRequest,
        response=TokenizeResponse,
        errors=(404,),
    )
    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        return await self.answer(request, tokenize)

    async def answer(self, request: web.Request, task: TextTask) -> web.StreamResponse:
        """Return the JSON that `task` makes of the body, in a helper process, because the body may be a chat."""
        async with self._bodies.body(request) as body:
            helpers = self._service.helpers if len(body) > SMALL_BODY else self._service.chats
            with self._slot():
                return await self._response(*await helpers.run(task, self._base(), body))

    async def _response(self, answer: bytes, model: str | None) -> web.StreamResponse:
        """Return the JSON `answer` to a request that names `model`, unless there is no such model."""
        if model is not None and model not in PLACEHOLDER_MODELS:
            try:
                await find_model(self._service, model)
            except AdapterNotFound as error:
                raise AdapterNotFound(error.message, field="model") from None
        return encoded_json(answer)

    @openai_route(
        "POST", "/detokenize", "Token ids to text", body=DetokenizeRequest, response=DetokenizeResponse, errors=(404,)
    )
    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        """Detokenise a small body in a thread, a large one in a helper process."""
        async with self._bodies.body(request) as body:
            with self._slot():
                if len(body) > SMALL_BODY:
                    return await self._response(*await self._service.helpers.run(detokenize, self._base(), body))
                context = TaskContext(self._service.tokenizer, lambda: None)
                return await self._response(*await asyncio.to_thread(detokenize, context, self._base(), body))

    def _base(self) -> BaseLimits:
        spec = self._service.engine.spec
        return BaseLimits(spec.name, spec.context, spec.vocab)

    @contextmanager
    def _slot(self) -> Iterator[None]:
        """Bound the number of texts that wait for a thread, and so their memory."""
        if self._running >= self._max_texts:
            raise QueueFull(f"{self._max_texts} texts are being tokenised already")
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    @Route("GET", "/tokenizer_info", "The tokenizer")
    async def tokenizer_info(self) -> TokenizerInfo:
        tokenizer, special = self._service.tokenizer, self._service.tokenizer.special_tokens
        return TokenizerInfo(
            tokenizer_class="PreTrainedTokenizerFast",
            vocab_size=tokenizer.vocab_size,
            model_max_length=self._service.engine.spec.context,
            bos_token=special.get("bos_token"),
            eos_token=special.get("eos_token"),
            pad_token=special.get("pad_token"),
            unk_token=special.get("unk_token"),
            chat_template=tokenizer.chat_template,
        )

    @Route("GET", "/version", "coserve's version")
    async def version(self) -> Version:
        return Version(version=__version__)


class BaseLimits(msgspec.Struct, frozen=True):
    """Facts about the base that the helper tasks need."""

    name: str
    context: int
    vocab: int


TextTask = Callable[[TaskContext, BaseLimits, bytes], tuple[bytes, str | None]]
"""A helper task that makes the JSON of a response of a request's body, and names the adapter that the body names."""


def tokenize(context: TaskContext, base: BaseLimits, body: bytes) -> tuple[bytes, str | None]:
    """Helper task of `POST /tokenize`: see `TextTask`."""
    request = decode_dialect(body, TokenizeRequest)
    adapter = adapter_of(request.model, base.name)
    ids = _encode(request, context.tokenizer)
    strings = [context.tokenizer.vocabulary.name(id) for id in ids] if request.return_token_strs else UNSET
    response = TokenizeResponse(tokens=ids, count=len(ids), max_model_len=base.context, token_strs=strings)
    return msgspec.json.encode(response), adapter


def _encode(request: TokenizeRequest, tokenizer: Tokenizer) -> list[int]:
    check_one_given({"prompt": request.prompt, "messages": request.messages}, field="prompt")
    if request.prompt is not None:
        for name in ("tools", "chat_template_kwargs"):
            if getattr(request, name):
                raise InvalidRequest("expected it with messages only", field=name)
        return tokenizer.encode(request.prompt, add_special=request.add_special_tokens is not False)
    if request.add_special_tokens:
        raise InvalidRequest("expected it left out with messages", field="add_special_tokens")
    chat = Chat(
        messages=request.messages or [],
        tools=request.tools or [],
        options=request.chat_template_kwargs or {},
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=request.continue_final_message or False,
    )
    return template_ids(tokenizer, chat)


def template_ids(tokenizer: Tokenizer, chat: Chat) -> list[int]:
    """Return the ids of a chat as its template renders it. Raises `InvalidRequest` if it is too long to count."""
    if characters(chat.messages) > MAX_CHARACTERS:
        raise InvalidRequest(f"expected at most {MAX_CHARACTERS} characters", field="messages")
    return chat_ids(tokenizer, chat)


def detokenize(context: TaskContext, base: BaseLimits, body: bytes) -> tuple[bytes, str | None]:
    """Helper task of `POST /detokenize`: see `TextTask`."""
    request = decode_dialect(body, DetokenizeRequest)
    adapter = adapter_of(request.model, base.name)
    if wrong := above_vocabulary(request.tokens, base.vocab):
        raise InvalidRequest(wrong, field="tokens")
    text = context.tokenizer.decode(request.tokens, skip_special=False)
    return msgspec.json.encode(DetokenizeResponse(prompt=text)), adapter
