"""JSON of a large answer in pieces: one call of the encoder keeps the interpreter's lock, and the loop, to its end."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar, cast

import msgspec
from aiohttp import web
from msgspec import UNSET

JSON = "application/json"
LIGHT = 4096
"""Values that are encoded at once: a few milliseconds at most."""
CHARACTERS = 64
"""Characters of a text that cost as much as a value."""
_encoder = msgspec.json.Encoder()


FEW = 1024
"""Entries of a list that are weighed one by one; those of a longer one are taken to be like its first and last."""

T = TypeVar("T")


class Packed(Generic[T]):
    """A list that is encoded as it grows."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def add(self, entries: Sequence[T], /) -> None:
        if entries:
            self._parts.append(_encoder.encode(entries)[1:-1])

    @staticmethod
    def joined(some: Iterable[Packed[T]]) -> list[T]:
        """As `as_list`, of several one behind the other."""
        whole = Packed[T]()
        for each in some:
            whole._parts += each._parts
        return whole.as_list()

    def as_list(self) -> list[T]:
        """The list, for an answer that is encoded and not read: JSON stands for it."""
        if len(self._parts) > 1:
            self._parts = [b",".join(self._parts)]
        return cast(list[T], msgspec.Raw(b"[" + b"".join(self._parts) + b"]"))


def weight(value: object) -> int:
    """Roughly how many values `value` holds."""
    if isinstance(value, msgspec.Raw):
        return 1 + memoryview(value).nbytes // CHARACTERS
    if isinstance(value, str):
        return 1 + len(value) // CHARACTERS
    if isinstance(value, msgspec.Struct):
        return 1 + sum(weight(getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, list | tuple) and value:
        if isinstance(value[0], int | float) or len(value) > FEW:
            return 1 + len(value) * max(weight(value[0]), weight(value[-1]))
        return 1 + sum(map(weight, value))
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
        start = b"["
        for group in _groups(value):
            yield start
            if len(group) > 1:
                yield _encoder.encode(group)[1:-1]
            else:
                yield from pieces(group[0])
            start = b","
        yield b"]"
    elif isinstance(value, msgspec.Raw):
        yield bytes(value)
    else:
        yield _encoder.encode(value)


def _groups(values: Sequence[object]) -> Iterator[Sequence[object]]:
    """Neighbours that weigh about `LIGHT` together; what is heavier stands alone."""
    if isinstance(values[0], int | float):
        yield from (values[first : first + LIGHT] for first in range(0, len(values), LIGHT))
        return
    first, total = 0, 0
    for place, value in enumerate(values):
        own = weight(value)
        if place > first and total + own > LIGHT:
            yield values[first:place]
            first, total = place, 0
        total += own
    yield values[first:]


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
