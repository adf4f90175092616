"""Sends requests, retries them and decodes responses, for every call of the SDK."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec

from coserve import __version__
from coserve.client.failures import event_error, response_error
from coserve.client.options import encode_body
from coserve.client.sse import Event, events
from coserve.client.transport import Request, Response, Transport, Upload
from coserve.core.errors import CapacityError, CoserveError, InternalError, InvalidRequest, Unreachable
from coserve.core.schemas.jobs import Job, Preparing, SubmissionEvent
from coserve.core.validation import decode_json

T = TypeVar("T")
Query = Mapping[str, str | int | None] | None
Body = msgspec.Struct | Upload | None

WAIT_ATTEMPT = 3
"""While waiting for a daemon, pauses stop growing after this attempt: 2 s with the default policy."""
CLOSED = "the client is closed"


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential back-off with jitter; times in seconds. `attempts` includes the first one; 1: never retry.

    A response of 429 or 503 is a refusal and may always be retried, after at least its `Retry-After`; one that names
    more than `longest_wait` is final. If the connection broke after the request was sent, it is unknown what the daemon
    did. Then only a repeatable request is retried: a GET, one with an `Idempotency-Key`, or a generation whose answer
    had not begun (it ended with the connection).
    """

    attempts: int = 5
    first: float = 0.5
    longest: float = 8.0
    longest_wait: float = 60.0
    reconnects: int = 30
    """Consecutive attempts to reconnect to a job's events."""
    on_wait: Callable[[CoserveError, float], None] | None = None
    """Called before each wait with the error and the seconds, on the client's own thread."""

    def delay(self, attempt: int, error: CoserveError, rng: random.Random) -> float:
        """Return seconds between attempt `attempt`, counted from 1, and the next: a random 50% to 100% of the back-off,
        or slightly more than the daemon's `Retry-After`, so that refused clients do not all return at once."""
        back_off = min(self.longest, self.first * 2.0 ** min(attempt - 1, 30)) * rng.uniform(0.5, 1)
        asked = _asked(error)
        return asked + back_off / 4 if asked > back_off else back_off

    def allows(self, error: CoserveError, request: Request) -> bool:
        """Return whether a retry is safe and useful."""
        if isinstance(error, Unreachable):
            return request.repeatable or not error.sent
        return error.status in (429, 503) and _asked(error) <= self.longest_wait


def _asked(error: CoserveError) -> float:
    return error.retry_after if isinstance(error, CapacityError) else 0.0


class Caller:
    """A transport with API key, retries and decoding. `sleep` and `rng` are for tests.

    After `close`, new requests and those in flight raise `InvalidRequest`.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        api_key: str | None,
        retry: RetryPolicy,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self._transport, self.retry = transport, retry
        self._sleep, self._rng = sleep, rng or random.Random()
        self._closed = False
        self._headers = {"User-Agent": f"coserve/{__version__}"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest(CLOSED)

    async def back_off(self, attempt: int, error: CoserveError) -> None:
        seconds = self.retry.delay(attempt, error, self._rng)
        if self.retry.on_wait is not None:
            self.retry.on_wait(error, seconds)
        await self._sleep(seconds)

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Query = None,
        headers: Mapping[str, str] | None = None,
        body: Body = None,
    ) -> Request:
        return Request(
            method,
            path,
            query=tuple((name, str(value)) for name, value in (query or {}).items() if value is not None),
            headers={**self._headers, **(headers or {})},
            body=encode_body(body) if isinstance(body, msgspec.Struct) else body,
        )

    async def read(self, request: Request, *, accepted: tuple[int, ...] = (), wait: bool = False) -> bytes:
        """Return the body of a response with status 2xx or one of `accepted`. Raise the daemon's error, or
        `Unreachable`.

        `wait`: retry without limit while the daemon answers 503 or not at all.
        """
        return await self._attempts(request, Response.read, accepted, wait)

    async def call(
        self, method: str, path: str, type: type[T], *, query: Query = None, body: Body = None, wait: bool = False
    ) -> T:
        """Send a request and decode the response. `wait`: see `read`."""
        return decode(await self.read(self.request(method, path, query=query, body=body), wait=wait), type)

    async def events(self, request: Request, *, again: bool = True) -> AsyncGenerator[Event, None]:
        """Yield the events of a response. `again`: retry until the response begins, but not afterwards. Raises the
        error of an event `error`."""
        response = await (self._attempts(request, _as_it_is) if again else self._attempt(request, _as_it_is, ()))
        try:
            async for event in _events(response):
                yield event
        except Unreachable:
            self._check_open()
            raise
        finally:
            response.close()

    async def submit(self, request: Request, show: Callable[[Preparing], None]) -> Job:
        """Send `POST /finetune` and return the job (see `submitted`). An attempt that breaks off is retried."""
        return await self._attempts(request, partial(submitted, show=show))

    async def stream(self, request: Request) -> Response:
        """Return a response whose body the caller reads."""
        return await self._attempts(request, _as_it_is)

    async def _attempts(
        self,
        request: Request,
        use: Callable[[Response], Awaitable[T]],
        accepted: tuple[int, ...] = (),
        wait: bool = False,
    ) -> T:
        attempt = 1
        while True:
            try:
                return await self._attempt(request, use, accepted)
            except CoserveError as error:
                self._check_open()
                if wait and error.status == 503:
                    attempt = min(attempt, WAIT_ATTEMPT)
                elif attempt >= self.retry.attempts or not self.retry.allows(error, request):
                    raise
                await self.back_off(attempt, error)
                attempt += 1

    async def _attempt(self, request: Request, use: Callable[[Response], Awaitable[T]], accepted: tuple[int, ...]) -> T:
        self._check_open()
        response = await self._transport.send(request)
        if 200 <= response.status < 300 or response.status in accepted:
            return await use(response)
        raise await response_error(response)


async def submitted(response: Response, show: Callable[[Preparing], None]) -> Job:
    """Return the job in a response to `POST /finetune`, which has events or JSON; call `show` with each progress
    event."""
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        return decode(await response.read(), Job)
    try:
        async for event in _events(response):
            submission = decode(event.data, SubmissionEvent)
            if submission.job is not None:
                return submission.job
            if submission.preparing is not None:
                show(submission.preparing)
    finally:
        response.close()
    raise Unreachable("the answer broke off before its end", sent=True)


async def _events(response: Response) -> AsyncIterator[Event]:
    """Yield the events of a response. Raises the error of an event `error`."""
    async for event in events(response):
        if event.event == "error":
            raise event_error(event.data)
        yield event


async def _as_it_is(response: Response) -> Response:
    return response


def decode(content: bytes | str, type: type[T]) -> T:
    """Decode JSON. Raise `InternalError` if it does not fit: the daemon speaks another version of the API."""
    try:
        return decode_json(content, type)
    except msgspec.DecodeError as error:
        raise InternalError(f"the daemon's response is not one that coserve {__version__} knows: {error}") from None
