"""A replay target for any server with OpenAI's `/v1/completions`: coserve, vLLM, SGLang and others."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Self

import aiohttp
import msgspec

from coserve.client.sse import Event, events
from coserve.core import errors
from coserve.workloads.formats import JSON_ERRORS, MAX_TOKENS
from coserve.workloads.gauges import Snapshot, read_snapshot
from coserve.workloads.replay import JobUpdate, Usage
from coserve.workloads.trace import FinetuneArrival, PromptArrival

MODELS_WAIT = 30.0
"""Timeout in seconds of listing a server's models."""
END_WAIT = 1.0
"""Seconds that a server has to end a stream after the stop mark; then the connection is closed."""
DONE = "[DONE]"
"""OpenAI's stop mark of a stream."""


class OpenAITarget:
    """Sends prompts as streamed completions. The model is the adapter's name (with `prefix`), or `model` for the base.

    A chunk's tokens come from the server's running usage if it sends one (`continuous_usage_stats`); else a chunk
    counts as one token and the final usage corrects the sum. `url` may end with `/v1`, as the base URL of OpenAI's
    clients does. Open it as `async with`.
    """

    _http: aiohttp.ClientSession

    def __init__(
        self,
        url: str,
        *,
        model: str,
        key: str | None = None,
        temperature: float = 0.0,
        prefix: str = "",
        models_wait: float = MODELS_WAIT,
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self._temperature, self._prefix = temperature, prefix
        self.model = model
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._models_wait = models_wait

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            headers=self._headers, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.close()

    def served_name(self, adapter: str) -> str:
        """Return the adapter's name on the server."""
        return self._prefix + adapter

    def body(self, arrival: PromptArrival) -> dict[str, object]:
        """Return the request's JSON. It has the seed only if tokens are sampled."""
        body: dict[str, object] = {
            "model": self.model if arrival.adapter is None else self.served_name(arrival.adapter),
            "prompt": arrival.prompt,
            "max_tokens": arrival.max_tokens,
            "temperature": self._temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if arrival.slo_class == "batch":
            body["service_tier"] = "flex"
        elif arrival.slo_class == "interactive":
            body["service_tier"] = "priority"
        return body | ({"seed": arrival.seed} if self._temperature > 0 else {})

    async def generate(self, arrival: PromptArrival) -> AsyncIterator[int | Usage]:
        """Stream an answer. Raises the error that the status stands for, `Unreachable` for a broken connection."""
        content = msgspec.json.encode(self.body(arrival))
        headers = {"Content-Type": "application/json"}
        counted, counts, reason, ended = 0, None, None, False
        try:
            async with self._http.post(f"{self._url}/v1/completions", data=content, headers=headers) as response:
                await check(response)
                async for event in events(response.content.iter_any()):
                    if event.data.strip() == DONE:
                        ended = True
                        break
                    chunk = read_chunk(event)
                    counts = chunk.usage or counts
                    reason = next((each.finish_reason for each in chunk.choices or ()), None) or reason
                    new = _new_tokens(chunk, counted)
                    counted += new
                    yield new
                if ended:  # the answer is complete
                    yield 0 if counts is None else Usage(counts.prompt_tokens, counts.completion_tokens, reason)
                    await _read_on(response)
        except aiohttp.ClientError as error:
            raise errors.Unreachable(f"the connection broke: {error}", sent=True) from error
        if not ended:
            raise errors.Unreachable("the stream broke off before its end", sent=True)

    async def probe(self, at: float) -> Snapshot:
        """Return the gauges of `/metrics`. Raises `Unreachable` if there is no such page, and as `read_snapshot`."""
        try:
            async with self._http.get(f"{self._url}/metrics") as response:
                if response.status != 200:
                    raise errors.Unreachable(f"/metrics answered {response.status}")
                return read_snapshot((await response.read()).decode(errors="replace"), at)
        except aiohttp.ClientError as error:
            raise errors.Unreachable(f"/metrics: {error}") from error

    async def models(self) -> list[str]:
        """Return the names of `/v1/models`; most servers list the base first. Raises as `generate`."""
        timeout = aiohttp.ClientTimeout(total=self._models_wait)
        none = f"no OpenAI-style server answers at {self._url}"
        try:
            async with self._http.get(f"{self._url}/v1/models", timeout=timeout) as response:
                await check(response)
                return read_models(await response.read())
        except TimeoutError as error:
            raise errors.Unreachable(f"{none}: no list of models within {self._models_wait:g} s") from error
        except (aiohttp.ClientError, *JSON_ERRORS, errors.AdapterNotFound) as error:  # 404: not an OpenAI-style server
            raise errors.Unreachable(f"{none}: {error}") from error

    async def submit(self, arrival: FinetuneArrival) -> str:
        raise errors.InvalidRequest("an OpenAI-style server is sent no fine-tuning jobs", field="server")

    async def watch(self, job: str) -> AsyncIterator[JobUpdate]:
        raise errors.InvalidRequest("an OpenAI-style server has no fine-tuning jobs", field="server")
        yield  # makes this an async generator

    async def cancel(self, job: str) -> None:
        """Do nothing: such a server has no jobs."""


def _new_tokens(chunk: Chunk, counted: int) -> int:
    if not chunk.choices:
        return 0
    if chunk.usage is not None:
        return max(0, chunk.usage.completion_tokens - counted)
    choice = chunk.choices[0]
    return int(bool(choice.text) or choice.finish_reason is None)


async def _read_on(response: aiohttp.ClientResponse) -> None:
    """Read a stream to its end after the stop mark, so that the connection can be reused."""
    with suppress(aiohttp.ClientError, TimeoutError):
        async with asyncio.timeout(END_WAIT):
            async for _ in response.content.iter_any():
                pass


_ERRORS: dict[int, type[errors.CoserveError]] = {
    401: errors.Unauthorized,
    403: errors.Unauthorized,
    404: errors.AdapterNotFound,
    429: errors.QueueFull,
    503: errors.EngineUnavailable,
}
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


class Counts(msgspec.Struct):
    """Token counts of a request, so far or at its end."""

    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0


class Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    choices: list[Choice] | None = None
    usage: Counts | None = None
    error: object = None
    kind: str = msgspec.field(default="", name="object")


class _Error(msgspec.Struct):
    """An error's code and message. The code may be a name, a status or missing."""

    code: str | int | None = None
    message: str | None = None


class _ErrorBody(_Error):
    """An error body, as OpenAI, coserve and vLLM send it. Older versions of vLLM put code and message next to
    `"object": "error"`."""

    error: _Error | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_CHUNK = msgspec.json.Decoder(Chunk)


def read_chunk(event: Event) -> Chunk:
    """Parse a chunk. Raises the error that came in its place, `InternalError` for anything else."""
    if event.event == "error":
        raise _stream_error(event.data)
    try:
        chunk = _CHUNK.decode(event.data)
    except JSON_ERRORS as error:
        raise _no_chunk(event.data) from error
    if chunk.error is not None or chunk.kind == "error":
        raise _stream_error(event.data)
    if chunk.choices is None and chunk.usage is None:
        raise _no_chunk(event.data)
    return chunk


def read_models(content: bytes) -> list[str]:
    """Return the names in a list of models. Raises one of `JSON_ERRORS`."""
    return [model.id for model in msgspec.json.decode(content, type=_Models).data]


async def check(response: aiohttp.ClientResponse) -> None:
    """Raise for a failed response: the error that the body's code names if its status matches, else the status's
    error."""
    if response.status < 300:
        return
    content = await response.read()
    found = _error_in(content)
    text = re.sub(r"\s+", " ", found.message or content[:200].decode(errors="replace"))
    message = f"status {response.status}: {text}"
    named = errors.BY_CODE.get(str(found.code))
    if named is not None and named.status == response.status:
        raise errors.error_from_code(named.code, message)
    kind = _ERRORS.get(response.status, errors.InvalidRequest if response.status < 500 else errors.InternalError)
    raise kind(message)


def _no_chunk(data: str) -> errors.InternalError:
    return errors.InternalError(f"expected a chunk of a completion, got {data[:200]}")


def _stream_error(data: str) -> errors.CoserveError:
    """Return the error at the end of a stream: the one that its code names, else `InternalError`."""
    found = _error_in(data.encode())
    if str(found.code) in errors.BY_CODE:
        return errors.error_from_code(str(found.code), found.message or "the stream ended with an error")
    return errors.InternalError(f"the stream ended with an error: {found.message or data[:200]}")


def _error_in(content: bytes) -> _Error:
    """Return the error in a body; without code and message if the body has another form."""
    try:
        body = msgspec.json.decode(content, type=_ErrorBody)
    except JSON_ERRORS:
        return _Error()
    return body.error or body
