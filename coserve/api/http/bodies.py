"""Reads request bodies, with limits on size, time, and the memory that all bodies hold.

aiohttp waits for the next byte without a limit. Here each 64 KiB must arrive within `read_timeout` seconds, so that
neither a silent client nor one that sends a byte a minute holds a connection.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar, cast

from aiohttp import web
from aiohttp.client_exceptions import ClientPayloadError
from aiohttp.http_exceptions import HttpProcessingError

from coserve.api.http.body_quota import BODY_QUOTA, stop_counting
from coserve.api.http.decode_tasks import decode_body, decode_corpus, decoded, unpack
from coserve.api.http.parsing import decode_json
from coserve.api.http.server import ask_for_body
from coserve.core import errors
from coserve.core.cancellation import uncancelled_thread
from coserve.core.schemas.jobs import FinetuneRequest
from coserve.data.offload.pool import HelperPool
from coserve.data.offload.protocol import name_of

MAX_JSON_BYTES = 16 << 20
"""Largest JSON body in bytes; a larger corpus must be uploaded as a file (multipart/form-data)."""
SMALL_BODY = 64 << 10
"""Largest JSON body in bytes that is decoded on the event loop."""
TOTAL_BYTES = 256 << 20
"""Most bytes of memory that all bodies hold together."""
CHUNK = 64 << 10
"""Bytes that must arrive within `read_timeout`."""
SEND_FILE = """a file of rows is sent by curl -F 'settings={"adapter": "NAME"}' -F file=@FILE"""
"""Hint added to the error if the body looks like the JSONL file itself."""

T = TypeVar("T")


class BodyReader:
    """Reads and decodes JSON bodies for all handlers. `read_timeout` is in seconds."""

    def __init__(self, helpers: HelperPool, *, max_body_bytes: int, read_timeout: float) -> None:
        self._helpers, self._max_body, self._timeout = helpers, max_body_bytes, read_timeout
        self._held = 0

    async def read(self, request: web.Request, decoder: type[T] | Callable[[bytes], T], *, dialect: bool = False) -> T:
        """Return what `decoder`, a type or a module-level function, makes of a JSON body.

        `dialect`: for clients of other servers, unknown fields with empty values are accepted. Raises `BodyTooLarge`,
        `RequestTimeout`, and what the decoder raises: for a type `MalformedJson`, `InvalidRequest`, `UnknownField`.
        """
        async with self.body(request) as body:
            return await self.decode(body, decoder, dialect=dialect)

    @asynccontextmanager
    async def body(self, request: web.Request) -> AsyncIterator[bytes]:
        """Read a JSON body, or another small one, into memory. Its bytes count towards `TOTAL_BYTES` until the block
        ends. They are returned as they came, whatever their `Content-Encoding`, which the gate checks. Raises
        `BodyTooLarge`, `RequestTimeout`, `QueueFull`."""
        limit = min(self._max_body, MAX_JSON_BYTES)
        check_head(request, limit)
        await ask_for_body(request)
        chunks, size = list[bytes](), 0
        try:
            while chunk := await self._next_chunk(request, limit):
                self._hold(len(chunk))
                chunks.append(chunk)
                size += len(chunk)
            body = b"".join(chunks)
            chunks.clear()
            yield body
        finally:
            self._held -= size
            stop_counting(request)

    async def decode(self, body: bytes, decoder: type[T] | Callable[[bytes], T], *, dialect: bool = False) -> T:
        """Decode a small body here, a large one in a helper process, because decoding holds the GIL from start to
        end."""
        if len(body) <= SMALL_BODY:
            return decoded(body, decoder, dialect=dialect)
        return cast("T", unpack(await self._helpers.run(decode_body, body, name_of(decoder), dialect)))

    @asynccontextmanager
    async def corpus(self, request: web.Request, staging: Path) -> AsyncIterator[tuple[FinetuneRequest, Path | None]]:
        """Read a `FinetuneRequest` from JSON. Rows of a large body go to a JSONL file, which is deleted when the block
        ends."""
        file: Path | None = None
        try:
            async with self.body(request) as body:
                try:
                    if len(body) <= SMALL_BODY:
                        settings = decode_json(body, FinetuneRequest)
                    else:
                        file = staging / f"rows-{secrets.token_hex(8)}"
                        settings = await self._helpers.run(decode_corpus, body, str(file))
                except (errors.InvalidRequest, errors.MalformedJson, errors.UnknownField) as error:
                    if error.field != "adapter" and b'"adapter"' not in body:  # it looks like a file of rows
                        error.message += f"; {SEND_FILE}"
                    raise
            yield settings, file if file is not None and await asyncio.to_thread(file.exists) else None
        except errors.BodyTooLarge as error:
            if self._max_body <= MAX_JSON_BYTES:
                raise
            advice = f"a larger corpus goes as a file, of at most {self._max_body} bytes (multipart/form-data)"
            raise errors.BodyTooLarge(f"{error.message}; {advice}") from None
        finally:
            if file is not None:
                await uncancelled_thread(file.unlink, missing_ok=True)

    def _hold(self, size: int) -> None:
        self._held += size
        if self._held > TOTAL_BYTES:
            self._held -= size
            raise errors.QueueFull("too many request bodies at once")

    async def _next_chunk(self, request: web.Request, limit: int) -> bytes:
        """Return the next 64 KiB of the body, or its rest; empty at its end."""
        chunk = bytearray()
        with body_errors():
            async with asyncio.timeout(self._timeout):
                while len(chunk) < CHUNK and (some := await request.content.read(CHUNK - len(chunk))):
                    chunk += some
                    await asyncio.sleep(0)  # yield: data that has arrived is read without waiting
        await check_size(request, limit)
        return bytes(chunk)


def check_head(request: web.Request, limit: int) -> None:
    """Refuse a body by its declared size, before it is read."""
    if request.content_length is not None and request.content_length > limit:
        raise errors.BodyTooLarge(f"expected a body of at most {limit} bytes, got {request.content_length}")


async def check_size(request: web.Request, limit: int) -> None:
    """Refuse a body that exceeds `limit` bytes or its project's quota, while it arrives: a chunked body does not
    declare its size. Raises `BodyTooLarge`, `StorageQuotaExceeded`."""
    if request.content.total_bytes > limit:
        raise errors.BodyTooLarge(f"expected a body of at most {limit} bytes")
    if (quota := request.get(BODY_QUOTA)) is not None:
        await quota.arrived(request.content.total_bytes)


@contextmanager
def body_errors() -> Iterator[None]:
    """Translate aiohttp's errors while a body is read into `RequestTimeout` or `InvalidRequest`."""
    try:
        yield
    except TimeoutError:
        raise errors.RequestTimeout("the body came too slowly") from None
    except (ClientPayloadError, web.RequestPayloadError) as error:
        raise errors.InvalidRequest(f"the body broke off: {type(error).__name__}") from None
    except (
        ValueError,
        RuntimeError,
        AssertionError,
        HttpProcessingError,
    ):  # aiohttp's multipart reader raises all four
        raise errors.InvalidRequest("the body is not multipart/form-data") from None
