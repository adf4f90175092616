"""Reads multipart bodies: settings as JSON, and files that are written to disk as they arrive."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.streams import StreamReader

from coserve.api.http.bodies import CHUNK, BodyReader, body_errors, check_head, check_size
from coserve.api.http.body_quota import stop_counting
from coserve.api.http.server import ask_for_body
from coserve.core.cancellation import uncancelled_thread
from coserve.core.errors import BodyTooLarge, InvalidRequest, QueueFull, UnsafeAdapter, UnsupportedEncoding
from coserve.core.names import ARCHIVES, PICKLE_SUFFIXES
from coserve.lora.files.archive import unpack_adapter
from coserve.state.durable import disk_errors

MAX_SETTINGS_BYTES = 1 << 20
MAX_UPLOADS = 8
VALIDATION = "validation"
"""The part with a file of rows for validation, and the name under which it is saved."""
ARCHIVE = "archive"
"""Name under which an archive of the expected files is saved."""
MAX_FIELDS = 8
"""Most fields of a form, its file not counted."""
MAX_FILENAME = 256
"""Most characters kept of a file's name; a longer one loses its beginning."""
MAX_LINES = 256
"""Most lines between the data of two parts: boundaries, a part's headers (128 at most), and a preamble."""
MAX_LINE = 8190
"""Most bytes of a line outside of a part's data: aiohttp's limit for headers."""

T = TypeVar("T")


class Form(NamedTuple):
    """Fields of a form, and its one file: the client's name for it, and where its content was saved."""

    fields: dict[str, str]
    filename: str
    path: Path


class UploadReader:
    """Reads uploads for all handlers. `read_timeout`: seconds for each 64 KiB; `max_body_bytes`: limit of one
    upload."""

    def __init__(self, bodies: BodyReader, *, max_body_bytes: int, read_timeout: float) -> None:
        self._bodies, self._max_body, self._timeout = bodies, max_body_bytes, read_timeout
        self._running = 0

    @asynccontextmanager
    async def read(
        self, request: web.Request, type: type[T], staging: Path, names: tuple[str, ...] = ()
    ) -> AsyncIterator[tuple[T, Path]]:
        """Yield the part `settings` as `type`, and a folder with the files, which is deleted when the block ends.

        `names`: the file names to expect, or one archive of an adapter with them; empty: one file, saved as `file`, and
        maybe a part `validation`, saved under this name. At most `MAX_UPLOADS` run at once.
        """
        async with self._folder(request, staging) as folder:
            with body_errors():
                settings = await self._receive(request, folder, names)
            if (archive := folder / ARCHIVE).exists():
                await uncancelled_thread(unpack_adapter, archive, folder, self._max_body)
                await uncancelled_thread(archive.unlink)
            yield await self._bodies.decode(settings, type), folder

    @asynccontextmanager
    async def form(self, request: web.Request, staging: Path) -> AsyncIterator[Form]:
        """Yield an HTML form with one file, which is deleted when the block ends unless it was moved."""
        async with self._folder(request, staging) as folder:
            with body_errors():
                form = await self._form(request, folder / "file")
            yield form

    @asynccontextmanager
    async def _folder(self, request: web.Request, staging: Path) -> AsyncIterator[Path]:
        """Yield a folder for an upload's files, deleted when the block ends. At most `MAX_UPLOADS` run at once."""
        check_head(request, self._max_body)
        if self._running >= MAX_UPLOADS:
            raise QueueFull(f"{MAX_UPLOADS} uploads are running already: try again, and send fewer at once")
        await ask_for_body(request)
        self._running += 1
        folder = staging / f"upload-{secrets.token_hex(8)}"
        try:
            await uncancelled_thread(folder.mkdir, parents=True)
            yield folder
        finally:
            self._running -= 1
            stop_counting(request)
            await uncancelled_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _receive(self, request: web.Request, folder: Path, names: tuple[str, ...]) -> bytes:
        """Save the files and return the bytes of the settings."""
        settings: bytes | None = None
        files: set[str] = set()
        async for part in self._parts(request):
            if part.name == "settings" and settings is None:
                settings = await self._settings(request, part)
            elif part.name == "file":
                name = _file_name(part, names, files)
                files.add(name)
                await self._save(request, part, folder / name)
            elif part.name == VALIDATION and not names and VALIDATION not in files:
                files.add(VALIDATION)
                await self._save(request, part, folder / VALIDATION)
            else:
                raise InvalidRequest(f"expected one part 'settings' and parts 'file', got {str(part.name)[:80]!r}")
        for missing in sorted(set() if ARCHIVE in files else set(names or ("file",)) - files):
            raise InvalidRequest(f"expected a file {missing!r}, got none", field="file")
        if settings is None:
            raise InvalidRequest("expected a part 'settings', got none", field="settings")
        return settings

    async def _form(self, request: web.Request, path: Path) -> Form:
        fields: dict[str, str] = {}
        filename: str | None = None
        async for part in self._parts(request):
            name = str(part.name)[:80]
            if name in fields or (name == "file" and filename is not None):
                raise InvalidRequest(f"expected one part {name!r}, got more", field=name)
            if name == "file":
                filename = (part.filename or "file")[-MAX_FILENAME:].encode(errors="replace").decode()
                await self._save(request, part, path)
            elif len(fields) == MAX_FIELDS:
                raise InvalidRequest(f"expected at most {MAX_FIELDS} fields beside the file")
            else:
                try:
                    fields[name] = (await self._settings(request, part)).decode()
                except UnicodeDecodeError:
                    raise InvalidRequest("expected UTF-8", field=name) from None
        if filename is None:
            raise InvalidRequest("expected a file, got none", field="file")
        return Form(fields, filename, path)

    async def _parts(self, request: web.Request) -> AsyncIterator[BodyPartReader]:
        """Yield the parts of a body. Raises ValueError for too many lines between them."""
        reader = MultipartReader(request.headers, cast(StreamReader, _PacedStream(request.content)))
        while True:
            async with asyncio.timeout(self._timeout):
                part = await reader.next()
            if part is None:
                return
            if isinstance(part, MultipartReader):
                raise InvalidRequest("expected no multipart within a multipart body")
            if not part.name:
                raise InvalidRequest(
                    'expected a name for each part (Content-Disposition: form-data; name="file"), got none'
                )
            if any(name in part.headers for name in ("Content-Encoding", "Content-Transfer-Encoding")):
                raise UnsupportedEncoding("parts with an encoding are not accepted")
            yield part

    async def _chunks(self, request: web.Request, part: BodyPartReader) -> AsyncIterator[bytes]:
        while True:
            chunk = bytearray()
            async with asyncio.timeout(self._timeout):
                while len(chunk) < CHUNK and (some := await part.read_chunk(CHUNK)):
                    chunk += some
            await check_size(request, self._max_body)
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
                await uncancelled_thread(file.write, chunk)


def is_upload(request: web.Request) -> bool:
    return request.content_type == "multipart/form-data"


def _file_name(part: BodyPartReader, names: tuple[str, ...], seen: set[str]) -> str:
    """Return the name to save a file under: one of ours, never the client's."""
    if not names:
        if "file" in seen:
            raise InvalidRequest("expected one file, got more", field="file")
        return "file"
    given = part.filename or ""
    if given.lower().endswith(PICKLE_SUFFIXES):
        raise UnsafeAdapter(f"expected safetensors, got {given[-80:]!r}: pickle files are never opened", field="file")
    name = ARCHIVE if given.lower().endswith(ARCHIVES) else given
    if name not in (*names, ARCHIVE) or name in seen or (seen and ARCHIVE in (*seen, name)):
        expected = f"one file each of {' and '.join(names)}, or one archive ({', '.join(ARCHIVES)})"
        raise InvalidRequest(f"expected {expected}, got {given[-80:]!r}", field="file")
    return name


class _PacedStream:
    """A body's stream for aiohttp's multipart reader: yields to the event loop at every read, and bounds the lines
    between parts, which aiohttp does not."""

    def __init__(self, content: StreamReader) -> None:
        self._content = content
        self._lines = 0

    async def readline(self, *, max_line_length: int | None = None) -> bytes:
        """Raises `LineTooLong`, and ValueError after `MAX_LINES` lines without data of a part."""
        self._lines += 1
        if self._lines > MAX_LINES:
            raise ValueError("too many lines between parts")
        await asyncio.sleep(0)
        return await self._content.readline(max_line_length=max_line_length or MAX_LINE)

    async def read(self, n: int = -1) -> bytes:
        self._lines = 0
        await asyncio.sleep(0)
        return await self._content.read(n)

    def unread_data(self, data: bytes) -> None:
        self._content.unread_data(data)

    def at_eof(self) -> bool:
        return self._content.at_eof()
