"""Any server with OpenAI's `/v1/completions` as the target of a replay: coserve, vLLM, SGLang and others."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

import aiohttp
import msgspec

from coserve.client.sse import events
from coserve.errors import (
    BY_CODE,
    AdapterNotFound,
    CoserveError,
    EngineUnavailable,
    InternalError,
    InvalidRequest,
    QueueFull,
    Unauthorized,
    Unreachable,
    error_from_code,
)
from coserve.workloads.gauges import Snapshot, read_snapshot
from coserve.workloads.replay import JobUpdate, Usage
from coserve.workloads.trace import FinetuneArrival, PromptArrival

_ERRORS: dict[int, type[CoserveError]] = {
    401: Unauthorized,
    403: Unauthorized,
    404: AdapterNotFound,
    429: QueueFull,
    503: EngineUnavailable,
}


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


class _Error(msgspec.Struct):
    """As OpenAI, coserve and vLLM send it; the code may be a name, a status or missing."""

    code: str | int | None = None
    message: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


class OpenAITarget:
    """Sends prompts as streamed completions; `model` is the adapter's name (with `prefix`), or `model` for the base.

    Every chunk's tokens are counted by the server's running usage where it sends one (`continuous_usage_stats`), else a chunk counts as
    one token and the usage at the end corrects the sum. `url` may end with `/v1`, as the base URL of OpenAI's clients does. Open it
    as `async with`.
    """

    def __init__(
        self, url: str, *, model: str, key: str | None = None, temperature: float = 0.0, prefix: str = ""
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self._temperature, self._prefix = temperature, prefix
        self.model = model
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._decoder = msgspec.json.Decoder(_Chunk)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def _http(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the target is not open"
        return self._session

    def served_name(self, adapter: str) -> str:
        """The adapter's name on the server."""
        return self._prefix + adapter

    def body(self, arrival: PromptArrival) -> dict[str, object]:
        """The request's JSON. The seed goes with it only where tokens are sampled."""
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
        """Raises the error that the status stands for, `Unreachable` for a broken connection."""
        content = msgspec.json.encode(self.body(arrival))
        headers = {"Content-Type": "application/json"}
        counted, usage, ended = 0, None, False
        try:
            async with self._http.post(f"{self._url}/v1/completions", data=content, headers=headers) as response:
                await _check(response)
                async for event in events(response.content.iter_any()):
                    if event.data == "[DONE]":  # read on to the end, so that the connection can be used again
                        ended = True
                        continue
                    chunk = self._chunk(event.data)
                    usage = chunk.usage or usage
                    new = self._new_tokens(chunk, counted)
                    counted += new
                    yield new
        except aiohttp.ClientError as error:
            raise Unreachable(f"the connection broke: {error}", sent=True) from error
        if not ended:
            raise Unreachable("the stream broke off before its end", sent=True)
        if usage is not None:
            yield Usage(usage.prompt_tokens, usage.completion_tokens)

    def _chunk(self, data: str) -> _Chunk:
        try:
            chunk = self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise InternalError(f"expected a chunk of a completion, got {data[:80]!r}") from error
        if chunk.error is not None:
            raise _stream_error(bytes(chunk.error))
        return chunk

    def _new_tokens(self, chunk: _Chunk, counted: int) -> int:
        if not chunk.choices:
            return 0
        if chunk.usage is not None:
            return max(0, chunk.usage.completion_tokens - counted)
        choice = chunk.choices[0]
        return int(bool(choice.text) or choice.finish_reason is None)

    async def probe(self, at: float) -> Snapshot:
        """The gauges of `/metrics`. Raises `Unreachable` where there is none."""
        try:
            async with self._http.get(f"{self._url}/metrics") as response:
                if response.status != 200:
                    raise Unreachable(f"/metrics answered {response.status}")
                return read_snapshot(await response.text(), at)
        except aiohttp.ClientError as error:
            raise Unreachable(f"/metrics: {error}") from error

    async def models(self) -> list[str]:
        """The names of `/v1/models`: the base first, as far as servers keep to it. Raises as `generate`."""
        try:
            async with self._http.get(f"{self._url}/v1/models") as response:
                await _check(response)
                found = msgspec.json.decode(await response.read(), type=_Models)
        except (aiohttp.ClientError, msgspec.MsgspecError, AdapterNotFound) as error:  # 404: another kind of server
            raise Unreachable(f"no OpenAI-style server answers at {self._url}: {error}") from error
        return [model.id for model in found.data]

    async def submit(self, arrival: FinetuneArrival) -> str:
        raise InvalidRequest("an OpenAI-style server is sent no fine-tuning jobs", field="server")

    async def watch(self, job: str) -> AsyncIterator[JobUpdate]:
        raise InvalidRequest("an OpenAI-style server has no fine-tuning jobs", field="server")
        yield  # an async generator

    async def cancel(self, job: str) -> None:
        """There are no jobs."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def _check(response: aiohttp.ClientResponse) -> None:
    """Raises the error that the body's code names if that has the response's status, else the one that the status stands for."""
    if response.status < 300:
        return
    content = await response.read()
    found = _error_in(content)
    text = re.sub(r"\s+", " ", found.message or content[:200].decode(errors="replace"))
    message = f"status {response.status}: {text}"
    named = BY_CODE.get(str(found.code))
    if named is not None and named.status == response.status:
        raise error_from_code(named.code, message)
    kind = _ERRORS.get(response.status, InvalidRequest if response.status < 500 else InternalError)
    raise kind(message)


def _error_in(content: bytes) -> _Error:
    """Without code and message for a body of another form."""
    try:
        return msgspec.json.decode(content, type=_ErrorBody).error
    except msgspec.MsgspecError:
        return _Error()


def _stream_error(content: bytes) -> CoserveError:
    """The error at the end of a stream: the one that its code names, else `InternalError`."""
    found = _error_in(b'{"error": ' + content + b"}")
    if str(found.code) in BY_CODE:
        return error_from_code(str(found.code), found.message or "the stream ended with an error")
    return InternalError(f"the stream ended with an error: {content[:200].decode(errors='replace')}")
