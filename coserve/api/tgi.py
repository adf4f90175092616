"""LoRAX's and TGI's way to ask for text."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import web

from coserve.api.answers import Refusal, answer, describe, refuse
from coserve.api.intake import Intake
from coserve.api.openai_completions import FLOOR
from coserve.api.service import Service
from coserve.api.sse import EventStream
from coserve.api.tgi_schemas import (
    TgiDetails,
    TgiError,
    TgiFinish,
    TgiParameters,
    TgiPrefillToken,
    TgiRequest,
    TgiResponse,
    TgiStreamDetails,
    TgiStreamEvent,
    TgiToken,
)
from coserve.config import Config
from coserve.errors import CoserveError, InvalidRequest, QueueFull, RequestError
from coserve.schemas import ChosenLogprob, GenerateChunk, GenerateRequest, PromptLogprob

DEFAULT_TOKENS = 100

_ONLY: dict[str, tuple[object, ...]] = {
    "adapter_source": ("local",),
    "api_token": (),
    "merged_adapters": (),
    "best_of": (1,),
    "typical_p": (1, 1.0),
    "truncate": (),
    "watermark": (False,),
    "top_n_tokens": (0,),
    "return_k_alternatives": (0,),
    "apply_chat_template": (False,),
    "schema": (),
    "response_format": (),
    "grammar": (),
}
"""What a parameter that stands for something we don't do may say, besides null."""


def tgi_error(error: CoserveError) -> TgiError:
    match error:
        case QueueFull():
            kind = "overloaded"
        case RequestError():
            kind = "validation"
        case _:
            kind = "generation"
    return TgiError(error=describe(error).message, error_type=kind)  # type: ignore[arg-type]  # one of the three


TGI = Refusal(TgiError, tgi_error)


def tgi_request(ask: TgiRequest, *, stream: bool) -> GenerateRequest:
    """Raises `InvalidRequest`, which names the parameter."""
    given = ask.parameters or TgiParameters()
    for name, neutral in _ONLY.items():
        value = getattr(given, name)
        if value is not None and value not in neutral:
            left = "expected it left out" + "".join(f" or {choice!r}" for choice in neutral[:1])
            raise InvalidRequest(f"{name} is not supported: {left}", field=f"parameters.{name}")
    if stream and given.decoder_input_details:
        raise InvalidRequest("expected it left out in streams", field="parameters.decoder_input_details")
    warped = any(value is not None for value in (given.temperature, given.top_k, given.top_p))
    return GenerateRequest(
        prompt=ask.inputs,
        adapter=given.adapter_id,
        stream=stream,
        max_tokens=given.max_new_tokens or DEFAULT_TOKENS,
        temperature=(given.temperature or 1.0) if given.do_sample or warped else 0.0,
        top_k=given.top_k or 0,
        top_p=given.top_p or 1.0,
        repetition_penalty=given.repetition_penalty or 1.0,
        frequency_penalty=given.frequency_penalty or 0.0,
        stop=given.stop,
        include_stop_str_in_output=True,
        ignore_eos=given.ignore_eos_token or False,
        logprobs=0 if stream or given.details else None,
        prompt_logprobs=0 if given.details and given.decoder_input_details else None,
        seed=given.seed,
    )


class TgiApi:
    """`generate_stream` is a route; `answer` is for a body that came to `/generate`."""

    def __init__(self, service: Service, config: Config, intake: Intake) -> None:
        self._service, self._config, self._intake = service, config, intake

    async def generate_stream(self, request: web.Request) -> web.StreamResponse:
        try:
            ask = await self._intake.json(request, TgiRequest)
        except CoserveError as error:
            return _refuse(error)
        return await self.answer(request, ask, stream=True)

    async def answer(self, request: web.Request, ask: TgiRequest, *, stream: bool) -> web.StreamResponse:
        """The answer in TGI's shape, errors too."""
        try:
            asked = tgi_request(ask, stream=stream)
            if stream:
                return await self._stream(request, ask, asked)
            return answer(await self._collect(ask, asked))
        except CoserveError as error:
            return _refuse(error)

    async def _collect(self, ask: TgiRequest, asked: GenerateRequest) -> TgiResponse:
        given = ask.parameters or TgiParameters()
        found = await self._service.generation.collect(asked)
        (choice,) = found.choices
        details = TgiDetails(
            finish_reason=_finish(choice.finish_reason, choice.stop_reason),
            prompt_tokens=found.usage.prompt_tokens,
            generated_tokens=found.usage.completion_tokens,
            seed=found.seed if asked.temperature else None,
            prefill=[_prefill(entry) for entry in found.prompt_logprobs or []],
            tokens=[self._token(entry, entry.token) for entry in choice.logprobs or []],
        )
        text = ask.inputs + choice.text if given.return_full_text else choice.text
        return TgiResponse(generated_text=text, details=details if given.details else None)

    async def _stream(self, request: web.Request, ask: TgiRequest, asked: GenerateRequest) -> web.StreamResponse:
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
        given = ask.parameters or TgiParameters()
        parts = [ask.inputs] if given.return_full_text else []
        index = 0
        async for chunk in chunks:
            parts.append(chunk.text)
            entries = chunk.logprobs or []
            for place, entry in enumerate(entries, start=1):
                index += 1
                last = place == len(entries)
                token = self._token(entry, chunk.text if last else "")
                if not last or chunk.finish_reason is None:
                    yield TgiStreamEvent(index=index, token=token)
                    continue
                assert chunk.usage is not None, "the last chunk counts"
                details = TgiStreamDetails(
                    finish_reason=_finish(chunk.finish_reason, chunk.stop_reason),
                    prompt_tokens=chunk.usage.prompt_tokens,
                    generated_tokens=chunk.usage.completion_tokens,
                    seed=chunk.seed if asked.temperature else None,
                )
                text = "".join(parts)
                yield TgiStreamEvent(
                    index=index, token=token, generated_text=text, details=details if given.details else None
                )

    def _token(self, entry: ChosenLogprob, text: str) -> TgiToken:
        """Readers leave special tokens out of the text: one that brings text held back before it is not special."""
        special = entry.token_id in self._service.tokenizer.special_ids and text in ("", entry.token)
        shown = entry.token if special else text
        return TgiToken(id=entry.token_id, text=shown, logprob=max(entry.logprob, FLOOR), special=special)


def _refuse(error: CoserveError) -> web.Response:
    response = refuse(error, TGI)
    if error.status == 400:
        response.set_status(422)  # what TGI's clients know as a validation error
    return response


def _finish(reason: str, stop: str | int | None) -> TgiFinish:
    if reason == "length":
        return "length"
    return "stop_sequence" if isinstance(stop, str) else "eos_token"


def _prefill(entry: PromptLogprob) -> TgiPrefillToken:
    logprob = None if entry.logprob is None else max(entry.logprob, FLOOR)
    return TgiPrefillToken(id=entry.token_id, text=entry.token, logprob=logprob)
