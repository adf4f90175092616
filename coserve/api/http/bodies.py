"""Bodies come in bounded: in size, in time, and in what all of them together hold in memory.

aiohttp waits for ever for a body's next byte. Here each further 64 KiB has `read_timeout` seconds, so that neither
silence nor a byte a minute holds a connection.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar, cast

import msgspec
from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.client_exceptions import ClientPayloadError
from aiohttp.http_exceptions import HttpProcessingError

from coserve.api.http.decode_tasks import Decode, DecodeCorpus, decode_body, decode_corpus, decoded, unpack
from coserve.api.http.multipart import multipart_reader
from coserve.api.http.parsing import decode_json
from coserve.api.http.server import ask_for_body
from coserve.errors import (
    BodyTooLarge,
    InvalidRequest,
    QueueFull,
    RequestTimeout,
    UnsafeAdapter,
    UnsupportedEncoding,
)
from coserve.names import PICKLE_SUFFIXES
from coserve.offload.pool import HelperPool
from coserve.offload.protocol import name_of
from coserve.schemas import FinetuneRequest
from coserve.state.commits import uncancelled
from coserve.state.durable import disk_errors

MAX_JSON_BYTES = 16 << 20
"""Largest JSON body; a larger corpus goes as a file."""
SMALL_BODY = 64 << 10
"""Bytes of JSON that are decoded on the event loop."""
MAX_SETTINGS_BYTES = 1 << 20
TOTAL_BYTES = 256 << 20
"""What all bodies that are being read hold in memory."""
CHUNK = 64 << 10
MAX_UPLOADS = 8

T = TypeVar("T")


class BodyReader:
    """Reads bodies for all handlers. `read_timeout` in seconds, `max_body_bytes` for one upload."""

    def __init__(
        self, helpers: HelperPool, context: Callable[[], int | None], *, max_body_bytes: int, read_timeout: float
    ) -> None:
        """`context`: of the base, in tokens; None while no engine has started."""
        self._helpers, self._context = helpers, context
        self._max_body, self._timeout = max_body_bytes, read_timeout
        self._held = 0
        self._uploads = 0

    async def json(self, request: web.Request, type: type[T]) -> T:
        """The body as `type`. Raises `MalformedJson`, `InvalidRequest`, `UnknownField`, `BodyTooLarge`..."""
        async with self.body(request) as body:
            return await self._decode(body, type)

    async def dialect(self, request: web.Request, type: type[T]) -> T:
        """As `json`, for the bodies of other servers' clients: unknown fields that ask for nothing are taken."""
        async with self.body(request) as body:
            return await self._decode(body, type, dialect=True)

    async def read(self, request: web.Request, decode: Callable[[bytes], T]) -> T:
        """What `decode`, a function at the level of its module, makes of a JSON body.

        Raises `BodyTooLarge`, `RequestTimeout`, and what `decode` raises.
        """
        async with self.body(request) as body:
            return await self._decode(body, decode)

    @asynccontextmanager
    async def body(self, request: web.Request) -> AsyncIterator[bytearray]:
        """A JSON body, counted as held in memory until the block ends. Raises `BodyTooLarge`, `RequestTimeout`."""
        limit = min(self._max_body, MAX_JSON_BYTES)
        check_head(request, limit)
        await ask_for_body(request)
        body = bytearray()
        try:
            while chunk := await self._next_chunk(request, limit):
                self._hold(len(chunk))
                body += chunk
            yield body
        finally:
            self._held -= len(body)

    async def _decode(
        self, body: bytearray | bytes, decoder: type[T] | Callable[[bytes], T], *, dialect: bool = False
    ) -> T:
        """A small body here, a large one in a helper process: decoding keeps the interpreter's lock to the end."""
        if len(body) <= SMALL_BODY:
            return decoded(bytes(body), decoder, dialect=dialect)
        asked = Decode(name_of(decoder), dialect, self._context())
        return cast("T", unpack(await self._helpers.run(decode_body, asked, body)))

    @asynccontextmanager
    async def corpus(self, request: web.Request, staging: Path) -> AsyncIterator[tuple[FinetuneRequest, Path | None]]:
        """A `FinetuneRequest` as JSON. The rows of a large one come as a JSONL file, which goes when the block ends."""
        file: Path | None = None
        try:
            async with self.body(request) as body:
                if len(body) <= SMALL_BODY:
                    settings = decode_json(bytes(body), FinetuneRequest)
                else:
                    file = staging / f"rows-{secrets.token_hex(8)}"
                    packed = await self._helpers.run(decode_corpus, DecodeCorpus(str(file)), body)
                    settings = msgspec.msgpack.decode(packed, type=FinetuneRequest)
            yield settings, file if file is not None and await asyncio.to_thread(file.exists) else None
        finally:
            if file is not None:
                await uncancelled(asyncio.create_task(asyncio.to_thread(file.unlink, missing_ok=True)))

    def _hold(self, size: int) -> None:
        self._held += size
        if self._held > TOTAL_BYTES:
            self._held -= size
            raise QueueFull("too many request bodies at once")

    async def _next_chunk(self, request: web.Request, limit: int) -> bytes:
        """The next 64 KiB of the body, or its rest; empty at its end."""
        chunk = bytearray()
        with _body_errors():
            async with asyncio.timeout(self._timeout):
                while len(chunk) < CHUNK and (some := await request.content.read(CHUNK - len(chunk))):
                    chunk += some
                    await asyncio.sleep(0)  # what has come already is read without waiting
        check_size(request, limit)
        return bytes(chunk)

    @asynccontextmanager
    async def upload(
        self, request: web.Request, type: type[T], staging: Path, names: tuple[str, ...] = ()
    ) -> AsyncIterator[tuple[T, Path]]:
        """A multipart body: its `settings` as `type`, and a folder with its files, which goes when the block ends.

        `names`: what the files must be called; empty: there is one file, kept as `file`. At most 8 uploads run at once.
        """
        check_head(request, self._max_body)
        if self._uploads >= MAX_UPLOADS:
            raise QueueFull(f"{MAX_UPLOADS} uploads are running already")
        await ask_for_body(request)
        self._uploads += 1
        folder = staging / f"upload-{secrets.token_hex(8)}"
        try:
            await uncancelled(asyncio.create_task(asyncio.to_thread(folder.mkdir, parents=True)))
            with _body_errors():
                settings = await self._receive(request, folder, names)
            yield await self._decode(settings, type), folder
        finally:
            self._uploads -= 1
            await uncancelled(asyncio.create_task(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)))

    async def _receive(self, request: web.Request, folder: Path, names: tuple[str, ...]) -> bytes:
        """Save the files, return the settings."""
        settings: bytes | None = None
        files: set[str] = set()
        reader = multipart_reader(request)
        while (part := await self._next_part(reader)) is not None:
            if part.name == "settings" and settings is None:
                settings = await self._settings(request, part)
            elif part.name == "file":
                name = _file_name(part, names, files)
                files.add(name)
                await self._save(request, part, folder / name)
            else:
                raise InvalidRequest(f"expected one part 'settings' and parts 'file', got {str(part.name)[:80]!r}")
        for missing in sorted(set(names or ("file",)) - files):
            raise InvalidRequest(f"expected a file {missing!r}, got none", field="file")
        if settings is None:
            raise InvalidRequest("expected a part 'settings', got none", field="settings")
        return settings

    async def _next_part(self, reader: MultipartReader) -> BodyPartReader | None:
        async with asyncio.timeout(self._timeout):
            part = await reader.next()
        if isinstance(part, MultipartReader):
            raise InvalidRequest("expected no multipart within a multipart body")
        if part is not None and any(name in part.headers for name in ("Content-Encoding", "Content-Transfer-Encoding")):
            raise UnsupportedEncoding("parts with an encoding are not accepted")
        return part

    async def _chunks(self, request: web.Request, part: BodyPartReader) -> AsyncIterator[bytes]:
        while True:
            chunk = bytearray()
            async with asyncio.timeout(self._timeout):
                while len(chunk) < CHUNK and (some := await part.read_chunk(CHUNK)):
                    chunk += some
            check_size(request, self._max_body)
            if not chunk:
                return
            yield bytes(chunk)

    async def _settings(self, request: web.Request, part: BodyPartReader) -> bytes:
        body = bytearray()
        async for chunk in self._chunks(request, part):
            body += chunk
            if len(body) > MAX_SETTINGS_BYTES:
                raise BodyTooLarge(f"expected settings of at most {MAX_SETTINGS_BYTES} bytes", field="settings")
        return bytes(body)

    async def _save(self, request: web.Request, part: BodyPartReader, path: Path) -> None:
        with disk_errors(), path.open("xb") as file:
            async for chunk in self._chunks(request, part):
                await uncancelled(asyncio.create_task(asyncio.to_thread(file.write, chunk)))


def check_head(request: web.Request, limit: int) -> None:
    """Refuse by the headers alone what need not be read."""
    if "Content-Encoding" in request.headers:
        raise UnsupportedEncoding("compressed bodies are not accepted")
    if request.content_length is not None and request.content_length > limit:
        raise BodyTooLarge(f"expected a body of at most {limit} bytes, got {request.content_length}")


def check_size(request: web.Request, limit: int) -> None:
    """A chunked body says its size only by coming."""
    if request.content.total_bytes > limit:
        raise BodyTooLarge(f"expected a body of at most {limit} bytes")


def is_upload(request: web.Request) -> bool:
    return request.content_type == "multipart/form-data"


def _file_name(part: BodyPartReader, names: tuple[str, ...], seen: set[str]) -> str:
    """The name that a file is saved by: one of ours, never the client's."""
    if not names:
        if seen:
            raise InvalidRequest("expected one file, got more", field="file")
        return "file"
    given = part.filename or ""
    if given.lower().endswith(PICKLE_SUFFIXES):
        raise UnsafeAdapter(f"expected safetensors, got {given[-80:]!r}: pickle files are never opened", field="file")
    if given not in names or given in seen:
        raise InvalidRequest(f"expected one file each of {' and '.join(names)}, got {given[-80:]!r}", field="file")
    return given


@contextmanager
def _body_errors() -> Iterator[None]:
    """What aiohttp raises while a body comes in, as our errors."""
    try:
        yield
    except TimeoutError:
        raise RequestTimeout("the body came too slowly") from None
    except (ClientPayloadError, web.RequestPayloadError) as error:
        raise InvalidRequest(f"the body broke off: {type(error).__name__}") from None
    except (
        ValueError,
        RuntimeError,
        AssertionError,
        HttpProcessingError,
    ):  # aiohttp's multipart reader raises all four
        raise InvalidRequest("the body is no multipart/form-data") from None
