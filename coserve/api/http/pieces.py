"""JSON of a large answer in pieces: one call of the encoder keeps the interpreter's lock, and the loop, to its end."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator

import msgspec
from aiohttp import web
from msgspec import UNSET

JSON = "application/json"
LIGHT = 4096
"""Values that are encoded at once: a few milliseconds at most."""
CHARACTERS = 64
"""Characters of a text that cost as much as a value."""
_encoder = msgspec.json.Encoder()


def weight(value: object) -> int:
    """Roughly how many values `value` holds; the entries of a list are taken to be like its first and last."""
    if isinstance(value, str):
        return 1 + len(value) // CHARACTERS
    if isinstance(value, msgspec.Struct):
        return 1 + sum(weight(getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, list | tuple) and value:
        return 1 + len(value) * max(weight(value[0]), weight(value[-1]))
    if isinstance(value, dict):
        return 1 + sum(1 + weight(entry) for entry in value.values())
    return 1


def pieces(value: object) -> Iterator[bytes]:
    """What `msgspec.json.encode(value)` gives, in pieces of about `LIGHT` values."""
    heavy = weight(value) > LIGHT
    if heavy and isinstance(value, msgspec.Struct) and not value.__struct_config__.omit_defaults:
        start = b"{"
        for field in msgspec.structs.fields(type(value)):
            if (entry := getattr(value, field.name)) is not UNSET:
                yield start + _encoder.encode(field.encode_name) + b":"
                yield from pieces(entry)
                start = b","
        yield b"}" if start == b"," else b"{}"
    elif heavy and isinstance(value, list | tuple) and value:
        each = max(1, LIGHT // max(weight(value[0]), weight(value[-1])))
        start = b"["
        for first in range(0, len(value), each):
            yield start
            if each > 1:
                yield _encoder.encode(value[first : first + each])[1:-1]
            else:
                yield from pieces(value[first])
            start = b","
        yield b"]"
    else:
        yield _encoder.encode(value)


class LargeAnswer(web.Response):
    """Encodes its body when it is sent, with turns of the loop in between."""

    def __init__(self, value: object, status: int) -> None:
        super().__init__(status=status, content_type=JSON)
        self._value = value

    async def prepare(self, request: web.BaseRequest) -> object:  # type: ignore[override]
        if not self.prepared:
            parts = []
            for part in pieces(self._value):
                parts.append(part)
                await asyncio.sleep(0)
            self.body = io.BytesIO(b"".join(parts))
        return await super().prepare(request)
