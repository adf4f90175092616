"""The API of LoRAX and TGI, and the translation of their requests and answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from coserve import __version__
from coserve.api.generation.full_response import LogprobEntry, collect, floored
from coserve.api.http.body_types import refuse_unsupported
from coserve.api.http.json_blocks import JsonListBuilder
from coserve.api.http.responses import ErrorFormat, error_info, error_response, json_response
from coserve.api.http.route import Route
from coserve.api.http.sse import event_response
from coserve.api.service import Service
from coserve.api.tgi import schemas
from coserve.config import Config
from coserve.core.errors import CoserveError, InvalidRequest, QueueFull
from coserve.core.limits import MAX_CHOICES, MAX_STOPS
from coserve.core.schemas.generation import Choice, GenerateChunk, GenerateRequest, PromptLogprob
from coserve.core.schemas.output_format import JsonSchema, StructuredOutputs

DEFAULT_TOKENS = 100
_FIELDS = {
    "prompt": "inputs",
    "adapter": "adapter_id",
    "max_tokens": "max_new_tokens",
    "structured_outputs.json": "grammar or response_format",
    "structured_outputs.regex": "grammar",
}
"""TGI's names for our fields."""


def tgi_error(error: CoserveError) -> schemas.TgiError:
    """Return the error as TGI's: a text that names the field, and one of TGI's error types."""
    kind: schemas.TgiErrorType = "validation" if error.status < 500 else "generation"
    if isinstance(error, QueueFull):
        kind = "overloaded"
    info = error_info(error)
    field = None if info.field is None else _FIELDS.get(info.field, info.field.removeprefix("parameters."))
    message = info.message if field is None or field in info.message else f"{field}: {info.message}"
    return schemas.TgiError(error=message, error_type=kind)


TGI_ERRORS = ErrorFormat(schemas.TgiError, tgi_error, bad_request=422)
"""TGI's clients know 422 as a validation error."""


_generates = partial(
    Route, "POST", dialect=True, events=schemas.TgiStreamEvent, errors=(404, 422), error_formats=(TGI_ERRORS,)
)


def finish_reason(reason: str, stop: str | int | None) -> schemas.TgiFinish:
    if reason == "length":
        return "length"
    return "stop_sequence" if isinstance(stop, str) else "eos_token"


def _prefill(entry: LogprobEntry) -> schemas.TgiPrefillToken:
    logprob = None if entry.logprob is None else floored(entry.logprob)
    return schemas.TgiPrefillToken(id=entry.token_id, text=entry.token, logprob=logprob)


def top_tokens(
    entry: LogprobEntry, parameters: schemas.TgiParameters, special: Collection[int]
) -> list[schemas.TgiToken] | UnsetType:
    """Return the likeliest tokens at the position of `entry`, for `top_n_tokens`. `special`: ids of special tokens."""
    if not parameters.top_n_tokens:
        return UNSET
    return [
        schemas.TgiToken(id=top.token_id, text=top.token, logprob=floored(top.logprob), special=top.token_id in special)
        for top in entry.top[: parameters.top_n_tokens]
    ]


def token_of(
    entry: LogprobEntry, text: str, parameters: schemas.TgiParameters, special: Collection[int]
) -> schemas.TgiToken:
    """Return the token in TGI's format. Clients drop the text of tokens marked special, so a special token that
    releases text held back before it is not marked."""
    left_out = entry.token_id in special and text in ("", entry.token)
    others: list[schemas.TgiAlternative] | UnsetType = UNSET
    if parameters.return_k_alternatives:
        others = [
            schemas.TgiAlternative(id=top.token_id, text=top.token, logprob=floored(top.logprob))
            for top in entry.top[: parameters.return_k_alternatives]
        ]
    return schemas.TgiToken(
        id=entry.token_id,
        text=entry.token if left_out else text,
        logprob=floored(entry.logprob),
        special=left_out,
        alternative_tokens=others,
    )


class TgiLogprobsBuilder:
    """Collects the log-probabilities of one choice, or of the prompt."""

    def __init__(self, parameters: schemas.TgiParameters, special: Collection[int]) -> None:
        self._parameters, self._special = parameters, special
        self.tokens, self.prefill = JsonListBuilder[schemas.TgiToken](), JsonListBuilder[schemas.TgiPrefillToken]()
        self._tops = JsonListBuilder[list[schemas.TgiToken]]()
        self._sum, self._count = 0.0, 0

    def add(self, entries: Sequence[LogprobEntry], /) -> None:
        if isinstance(entries[0], PromptLogprob):
            self.prefill.add([_prefill(entry) for entry in entries])
            return
        self.tokens.add([token_of(entry, entry.text, self._parameters, self._special) for entry in entries])
        tops = (top_tokens(entry, self._parameters, self._special) for entry in entries)
        self._tops.add([top for top in tops if top is not UNSET])
        self._sum += sum(floored(entry.logprob) for entry in entries)
        self._count += len(entries)

    @property
    def mean(self) -> float:
        return self._sum / max(1, self._count)

    def tops(self) -> list[list[schemas.TgiToken]] | UnsetType:
        return self._tops.as_list() if self._parameters.top_n_tokens else UNSET


class TgiApi:
    """`generate_root`, `generate_stream` and `info` are routes; `respond` is for a body that came to `/generate`."""

    def __init__(self, service: Service, config: Config) -> None:
        self._service, self._config = service, config

    @_generates(
        "/",
        "Generate text, as the clients of LoRAX, TGI and huggingface_hub ask for it",
        response=schemas.TgiResponse,
        listed=True,
    )
    async def generate_root(self, request: web.Request, body: schemas.TgiRequest) -> web.StreamResponse:
        """Respond as TGI's root route: a list of one response, or a stream."""
        return await self._stream(request, body) if body.stream else json_response([await self._collect(body)])

    @_generates("/generate_stream", "Generate text as LoRAX and TGI do, a token an event")
    async def generate_stream(self, request: web.Request, body: schemas.TgiRequest) -> web.StreamResponse:
        return await self._stream(request, body)

    async def respond(self, request: web.Request, body: schemas.TgiRequest) -> web.StreamResponse:
        """Respond in TGI's format, also to errors."""
        try:
            return await self._stream(request, body) if body.stream else json_response(await self._collect(body))
        except CoserveError as error:
            return error_response(error, TGI_ERRORS)

    @Route("GET", "/info", "The base and the limits, as TGI says them")
    async def info(self) -> schemas.TgiInfo:
        engine = self._service.engine
        spec = engine.spec
        return schemas.TgiInfo(
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

    async def _collect(self, body: schemas.TgiRequest) -> schemas.TgiResponse:
        parameters = body.parameters or schemas.TgiParameters()
        native = tgi_request(body, stream=False)
        new = partial(TgiLogprobsBuilder, parameters, self._service.tokenizer.vocabulary.special_ids)
        full = await collect(native, self._service.generation.stream(native), new)
        found = full.response
        pairs = [(choice, scores or new()) for choice, scores in zip(found.choices, full.logprobs, strict=True)]
        (best, best_scores), *others = sorted(pairs, key=lambda pair: pair[1].mean, reverse=True)
        before = body.inputs if parameters.return_full_text else ""
        text = before + best.text
        if not has_details(parameters):
            return schemas.TgiResponse(generated_text=text)
        prefill = [] if full.prompt is None else full.prompt.prefill.as_list()

        def shared(choice: Choice, scores: TgiLogprobsBuilder) -> dict[str, Any]:
            return {
                "finish_reason": finish_reason(choice.finish_reason, choice.stop_reason),
                "generated_tokens": len(choice.token_ids),
                "seed": found.seed + choice.index if native.temperature else None,
                "prefill": prefill,
                "tokens": scores.tokens.as_list(),
                "top_tokens": scores.tops(),
            }

        sequences = [schemas.TgiSequence(**shared(*other), generated_text=before + other[0].text) for other in others]
        details = schemas.TgiDetails(
            **shared(best, best_scores), prompt_tokens=found.usage.prompt_tokens, best_of_sequences=sequences or UNSET
        )
        return schemas.TgiResponse(generated_text=text, details=details)

    async def _stream(self, request: web.Request, body: schemas.TgiRequest) -> web.StreamResponse:
        native = tgi_request(body, stream=True)
        async with aclosing(self._service.generation.stream(native)) as chunks:
            return await event_response(request, self._events(body, native, chunks), tgi_error)

    async def _events(
        self, body: schemas.TgiRequest, native: GenerateRequest, chunks: AsyncGenerator[GenerateChunk, None]
    ) -> AsyncGenerator[schemas.TgiStreamEvent, None]:
        parameters, special = body.parameters or schemas.TgiParameters(), self._service.tokenizer.vocabulary.special_ids
        parts = [body.inputs] if parameters.return_full_text else []
        index = 0
        async for chunk in chunks:
            parts.append(chunk.text)
            entries = chunk.logprobs or []
            for place, entry in enumerate(entries, start=1):
                index += 1
                last = place == len(entries)
                token = token_of(entry, chunk.text if last else "", parameters, special)
                top = top_tokens(entry, parameters, special)
                if not last or chunk.finish_reason is None:
                    yield schemas.TgiStreamEvent(index=index, token=token, top_tokens=top)
                    continue
                assert chunk.usage is not None, "the last chunk counts"
                details = schemas.TgiStreamDetails(
                    finish_reason=finish_reason(chunk.finish_reason, chunk.stop_reason),
                    prompt_tokens=chunk.usage.prompt_tokens,
                    input_length=chunk.usage.prompt_tokens,
                    generated_tokens=chunk.usage.completion_tokens,
                    seed=chunk.seed if native.temperature else None,
                )
                yield schemas.TgiStreamEvent(
                    index=index,
                    token=token,
                    top_tokens=top,
                    generated_text="".join(parts),
                    details=details if parameters.details else None,
                )


def tgi_request(body: schemas.TgiRequest, *, stream: bool) -> GenerateRequest:
    """Translate a request. Raises `InvalidRequest`, which names the parameter."""
    parameters = body.parameters or schemas.TgiParameters()
    refuse_unsupported(parameters, within="parameters.")
    if stream and parameters.decoder_input_details:
        raise InvalidRequest("expected it left out in streams", field="parameters.decoder_input_details")
    has_warpers = any(value is not None for value in (parameters.temperature, parameters.top_k, parameters.top_p))
    sampled = (parameters.do_sample or has_warpers) and parameters.temperature != 0
    if (parameters.best_of or 1) > 1 and (stream or not sampled or parameters.seed is not None):
        raise InvalidRequest("more than 1 needs sampling, no seed and no stream", field="parameters.best_of")
    scored = stream or has_details(parameters) or (parameters.best_of or 1) > 1
    return GenerateRequest(
        prompt=body.inputs,
        adapter=None if parameters.adapter_id == schemas.BASE_NAME else parameters.adapter_id or None,
        stream=stream,
        n=parameters.best_of or 1,
        max_tokens=parameters.max_new_tokens or DEFAULT_TOKENS,
        temperature=(parameters.temperature or 1.0) if sampled else 0.0,
        top_k=parameters.top_k or 0,
        top_p=parameters.top_p or 1.0,
        repetition_penalty=parameters.repetition_penalty or 1.0,
        frequency_penalty=parameters.frequency_penalty or 0.0,
        stop=parameters.stop,
        include_stop_str_in_output=True,
        ignore_eos=parameters.ignore_eos_token or False,
        logprobs=max(parameters.top_n_tokens or 0, parameters.return_k_alternatives or 0) if scored else None,
        prompt_logprobs=0 if parameters.decoder_input_details else None,
        seed=parameters.seed,
        truncate_prompt_tokens=parameters.truncate,
        structured_outputs=_structured(parameters),
    )


def _structured(parameters: schemas.TgiParameters) -> StructuredOutputs | None:
    grammar, form = parameters.grammar, parameters.response_format
    if form is not None:
        if grammar is not None:
            raise InvalidRequest("expected it without response_format", field="parameters.grammar")
        return StructuredOutputs(json_object=True) if form.schema is None else _schema(form.schema)
    match grammar:
        case None:
            return None
        case schemas.TgiGrammar("regex", str(expression)):
            return StructuredOutputs(regex=expression)
        case schemas.TgiGrammar("json", schema) | schemas.TgiGrammar("json_schema", {"schema": dict(schema)}):
            return _schema(schema)
    raise InvalidRequest(f"expected the value of a {grammar.type}", field="parameters.grammar.value")


def _schema(given: JsonSchema | str) -> StructuredOutputs:
    """Return the schema, for objects if it has properties and no type: TGI's Outlines reads it so."""
    schema: object = given
    with suppress(msgspec.DecodeError, RecursionError):  # a text that is no JSON is refused later
        schema = msgspec.json.decode(given) if isinstance(given, str) else given
    if isinstance(schema, dict) and "properties" in schema:
        return StructuredOutputs(json={"type": "object"} | schema)
    return StructuredOutputs(json=given)


def has_details(parameters: schemas.TgiParameters) -> bool:
    return bool(parameters.details or parameters.decoder_input_details)
