"""The API of LoRAX and TGI."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from functools import partial

from aiohttp import web
from msgspec import UNSET, UnsetType

from coserve import __version__
from coserve.api.generation.full_response import LogprobEntry, collect
from coserve.api.http.bodies import BodyReader
from coserve.api.http.json_blocks import JsonListBuilder
from coserve.api.http.responses import ErrorFormat, error_info, error_response, json_response
from coserve.api.http.sse import EventStream
from coserve.api.openai.completions import FLOOR
from coserve.api.openai.requests import refuse_unless_neutral
from coserve.api.service import Service
from coserve.api.tgi.schemas import (
    BASE_NAME,
    TgiAlternative,
    TgiDetails,
    TgiError,
    TgiErrorType,
    TgiFinish,
    TgiInfo,
    TgiParameters,
    TgiPrefillToken,
    TgiRequest,
    TgiResponse,
    TgiSequence,
    TgiStreamDetails,
    TgiStreamEvent,
    TgiToken,
)
from coserve.config import Config
from coserve.errors import CoserveError, InvalidRequest, QueueFull
from coserve.limits import MAX_CHOICES, MAX_STOPS
from coserve.schemas import GenerateChunk, GenerateRequest, PromptLogprob

DEFAULT_TOKENS = 100

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "adapter_source": ("local",),
    "api_token": (),
    "merged_adapters": (),
    "typical_p": (1, 1.0),
    "truncate": (),
    "watermark": (False,),
    "apply_chat_template": (False,),
    "schema": (),
    "response_format": (),
    "grammar": (),
}
"""Values accepted for features that are not implemented, besides empty ones."""


_FIELDS = {"prompt": "inputs", "adapter": "adapter_id", "max_tokens": "max_new_tokens"}
"""TGI's names of our fields."""


def tgi_error(error: CoserveError) -> TgiError:
    """A text, which names the field, and one of TGI's kinds."""
    kind: TgiErrorType = "validation" if error.status < 500 else "generation"
    if isinstance(error, QueueFull):
        kind = "overloaded"
    info = error_info(error)
    field = None if info.field is None else _FIELDS.get(info.field, info.field.removeprefix("parameters."))
    message = info.message if field is None or field in info.message else f"{field}: {info.message}"
    return TgiError(error=message, error_type=kind)


TGI_ERRORS = ErrorFormat(TgiError, tgi_error)


def tgi_error_response(error: CoserveError) -> web.Response:
    response = error_response(error, TGI_ERRORS)
    if error.status == 400:
        response.set_status(422)  # what TGI's clients know as a validation error
    return response


def tgi_request(ask: TgiRequest, *, stream: bool) -> GenerateRequest:
    """Raises `InvalidRequest`, which names the parameter."""
    given = ask.parameters or TgiParameters()
    for name, defaults in _NEUTRAL.items():
        refuse_unless_neutral(name, getattr(given, name), defaults, within="parameters.")
    if stream and given.decoder_input_details:
        raise InvalidRequest("expected it left out in streams", field="parameters.decoder_input_details")
    has_warpers = any(value is not None for value in (given.temperature, given.top_k, given.top_p))
    sampled = (given.do_sample or has_warpers) and given.temperature != 0
    if (given.best_of or 1) > 1 and (stream or not sampled or given.seed is not None):
        raise InvalidRequest("more than 1 needs sampling, no seed and no stream", field="parameters.best_of")
    scored = stream or _has_details(given) or (given.best_of or 1) > 1
    return GenerateRequest(
        prompt=ask.inputs,
        adapter=None if given.adapter_id == BASE_NAME else given.adapter_id or None,
        stream=stream,
        n=given.best_of or 1,
        max_tokens=given.max_new_tokens or DEFAULT_TOKENS,
        temperature=(given.temperature or 1.0) if sampled else 0.0,
        top_k=given.top_k or 0,
        top_p=given.top_p or 1.0,
        repetition_penalty=given.repetition_penalty or 1.0,
        frequency_penalty=given.frequency_penalty or 0.0,
        stop=given.stop,
        include_stop_str_in_output=True,
        ignore_eos=given.ignore_eos_token or False,
        logprobs=max(given.top_n_tokens or 0, given.return_k_alternatives or 0) if scored else None,
        prompt_logprobs=0 if given.decoder_input_details else None,
        seed=given.seed,
    )


def _has_details(given: TgiParameters) -> bool:
    return bool(given.details or given.decoder_input_details)


class TgiApi:
    """`generate_root`, `generate_stream` and `info` are routes; `answer` is for a body that came to `/generate`."""

    def __init__(self, service: Service, config: Config, bodies: BodyReader) -> None:
        self._service, self._config, self._bodies = service, config, bodies

    async def generate_root(self, request: web.Request) -> web.StreamResponse:
        """As TGI's own: a list of one answer, or a stream."""
        try:
            ask = await self._bodies.dialect(request, TgiRequest)
            if ask.stream:
                return await self._stream(request, ask)
            return json_response([await self._collect(ask)])
        except CoserveError as error:
            return tgi_error_response(error)

    async def generate_stream(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._stream(request, await self._bodies.dialect(request, TgiRequest))
        except CoserveError as error:
            return tgi_error_response(error)

    async def answer(self, request: web.Request, ask: TgiRequest) -> web.StreamResponse:
        """The response in TGI's format, errors too."""
        try:
            return await self._stream(request, ask) if ask.stream else json_response(await self._collect(ask))
        except CoserveError as error:
            return tgi_error_response(error)

    async def info(self, request: web.Request) -> web.StreamResponse:
        engine = self._service.engine
        spec = engine.spec
        return json_response(
            TgiInfo(
                model_id=spec.name,
                model_sha=spec.fingerprint,
                model_dtype=spec.dtype,
                model_device_type=spec.device,
                model_pipeline_tag="text-generation",
                max_concurrent_requests=self._config.max_queue,
                max_best_of=MAX_CHOICES,
                max_stop_sequences=MAX_STOPS,
                max_input_tokens=engine.max_model_len - 1,
                max_total_tokens=engine.max_model_len,
                router="coserve",
                version=__version__,
            )
        )

    async def _collect(self, ask: TgiRequest) -> TgiResponse:
        given = ask.parameters or TgiParameters()
        asked = tgi_request(ask, stream=False)
        new = partial(_TgiLogprobs, given, self._service.tokenizer.special_ids)
        full = await collect(asked, self._service.generation.stream(asked), new)
        found = full.response
        pairs = [(choice, scores or new()) for choice, scores in zip(found.choices, full.logprobs, strict=True)]
        (best, best_scores), *others = sorted(pairs, key=lambda pair: pair[1].mean, reverse=True)
        before = ask.inputs if given.return_full_text else ""
        text = before + best.text
        if not _has_details(given):
            return TgiResponse(generated_text=text)
        prefill = [] if full.prompt is None else full.prompt.prefill.as_list()
        details = TgiDetails(
            finish_reason=_finish(best.finish_reason, best.stop_reason),
            prompt_tokens=found.usage.prompt_tokens,
            generated_tokens=len(best.token_ids),
            seed=found.seed + best.index if asked.temperature else None,
            prefill=prefill,
            tokens=best_scores.tokens.as_list(),
            top_tokens=best_scores.tops(),
            best_of_sequences=[
                TgiSequence(
                    generated_text=before + other.text,
                    finish_reason=_finish(other.finish_reason, other.stop_reason),
                    generated_tokens=len(other.token_ids),
                    seed=found.seed + other.index,
                    prefill=prefill,
                    tokens=scores.tokens.as_list(),
                    top_tokens=scores.tops(),
                )
                for other, scores in others
            ]
            if others
            else UNSET,
        )
        return TgiResponse(generated_text=text, details=details)

    async def _stream(self, request: web.Request, ask: TgiRequest) -> web.StreamResponse:
        asked = tgi_request(ask, stream=True)
        stream = EventStream(request, write_timeout=self._config.read_timeout)
        async with (
            aclosing(self._service.generation.stream(asked)) as chunks,
            aclosing(self._events(ask, asked, chunks)) as events,
        ):
            try:
                async for event in events:
                    await stream.send(event)
            except CoserveError as error:
                if not stream.begun:
                    raise
                await stream.send(tgi_error(error))
        return await stream.close()

    async def _events(
        self, ask: TgiRequest, asked: GenerateRequest, chunks: AsyncGenerator[GenerateChunk, None]
    ) -> AsyncGenerator[TgiStreamEvent, None]:
        given, special = ask.parameters or TgiParameters(), self._service.tokenizer.special_ids
        parts = [ask.inputs] if given.return_full_text else []
        index = 0
        async for chunk in chunks:
            parts.append(chunk.text)
            entries = chunk.logprobs or []
            for place, entry in enumerate(entries, start=1):
                index += 1
                last = place == len(entries)
                token = _token(entry, chunk.text if last else "", given, special)
                top = _top(entry, given, special)
                if not last or chunk.finish_reason is None:
                    yield TgiStreamEvent(index=index, token=token, top_tokens=top)
                    continue
                assert chunk.usage is not None, "the last chunk counts"
                details = TgiStreamDetails(
                    finish_reason=_finish(chunk.finish_reason, chunk.stop_reason),
                    prompt_tokens=chunk.usage.prompt_tokens,
                    input_length=chunk.usage.prompt_tokens,
                    generated_tokens=chunk.usage.completion_tokens,
                    seed=chunk.seed if asked.temperature else None,
                )
                yield TgiStreamEvent(
                    index=index,
                    token=token,
                    top_tokens=top,
                    generated_text="".join(parts),
                    details=details if given.details else None,
                )


def _finish(reason: str, stop: str | int | None) -> TgiFinish:
    if reason == "length":
        return "length"
    return "stop_sequence" if isinstance(stop, str) else "eos_token"


def _prefill(entry: LogprobEntry) -> TgiPrefillToken:
    logprob = None if entry.logprob is None else max(entry.logprob, FLOOR)
    return TgiPrefillToken(id=entry.token_id, text=entry.token, logprob=logprob)


def _top(entry: LogprobEntry, given: TgiParameters, special: Collection[int]) -> list[TgiToken] | UnsetType:
    """The likeliest tokens at the place of `entry`, for `top_n_tokens`. `special`: ids of special tokens."""
    if not given.top_n_tokens:
        return UNSET
    return [
        TgiToken(id=top.token_id, text=top.token, logprob=max(top.logprob, FLOOR), special=top.token_id in special)
        for top in entry.top[: given.top_n_tokens]
    ]


def _token(entry: LogprobEntry, text: str, given: TgiParameters, special: Collection[int]) -> TgiToken:
    """Readers leave special tokens out of the text: one that brings text held back before it is not special."""
    left_out = entry.token_id in special and text in ("", entry.token)
    others: list[TgiAlternative] | UnsetType = UNSET
    if given.return_k_alternatives:
        others = [
            TgiAlternative(id=top.token_id, text=top.token, logprob=max(top.logprob, FLOOR))
            for top in entry.top[: given.return_k_alternatives]
        ]
    return TgiToken(
        id=entry.token_id,
        text=entry.token if left_out else text,
        logprob=_bounded(entry),
        special=left_out,
        alternative_tokens=others,
    )


def _bounded(entry: LogprobEntry) -> float:
    return FLOOR if entry.logprob is None else max(entry.logprob, FLOOR)


class _TgiLogprobs:
    """Collects the log-probabilities of one choice, or of the prompt."""

    def __init__(self, given: TgiParameters, special: Collection[int]) -> None:
        self._given, self._special = given, special
        self.tokens, self.prefill = JsonListBuilder[TgiToken](), JsonListBuilder[TgiPrefillToken]()
        self._tops = JsonListBuilder[list[TgiToken]]()
        self._sum, self._count = 0.0, 0

    def add(self, entries: Sequence[LogprobEntry], /) -> None:
        if isinstance(entries[0], PromptLogprob):
            self.prefill.add([_prefill(entry) for entry in entries])
            return
        self.tokens.add([_token(entry, entry.token, self._given, self._special) for entry in entries])
        tops = (_top(entry, self._given, self._special) for entry in entries)
        self._tops.add([top for top in tops if top is not UNSET])
        self._sum, self._count = self._sum + sum(map(_bounded, entries)), self._count + len(entries)

    @property
    def mean(self) -> float:
        return self._sum / max(1, self._count)

    def tops(self) -> list[list[TgiToken]] | UnsetType:
        return self._tops.as_list() if self._given.top_n_tokens else UNSET
