"""JSON of a large answer in pieces: one call of the encoder keeps the interpreter's lock, and the loop, to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Generic, TypeVar, cast

import msgspec
from aiohttp import web
from msgspec import UNSET

JSON = "application/json"
LIGHT = 4096
"""Values that are encoded at once: a few milliseconds at most."""
CHARACTERS = 64
"""Characters of a text that cost as much as a value."""
FEW = 1024
"""Entries of a list that are weighed; of a longer one, as many at even distances stand for the others."""
BLOCK = 1 << 16
"""Bytes that are joined, copied or sent at once."""

T = TypeVar("T")


class Blocks:
    """A list in JSON that is too large for one `Raw`: its entries without brackets, in blocks of whole ones."""

    def __init__(self, blocks: list[bytes]) -> None:
        self.blocks = blocks
        self.bytes = sum(map(len, blocks))

    def __iter__(self) -> Iterator[bytes]:
        start = b"["
        for block in self.blocks:
            yield start
            yield block
            start = b","
        yield b"]"


def _whole(value: object) -> msgspec.Raw:
    if not isinstance(value, Blocks):
        raise NotImplementedError(f"expected what JSON can say, got {type(value)}")
    return msgspec.Raw(b"".join(value))


_encoder = msgspec.json.Encoder(enc_hook=_whole)


class Packed(Generic[T]):
    """A list that is encoded as it grows."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._parts: list[bytes] = []
        self._open = 0
        """Bytes of `_parts`."""

    def add(self, entries: Sequence[T], /) -> None:
        if entries:
            self._parts.append(_encoder.encode(entries)[1:-1])
            self._open += len(self._parts[-1])
            if self._open >= BLOCK:
                self._close()

    def _close(self) -> None:
        if self._parts:
            self._blocks.append(b",".join(self._parts))
            self._parts, self._open = [], 0

    @staticmethod
    def joined(some: Iterable[Packed[T]]) -> list[T]:
        """As `as_list`, of several one behind the other."""
        whole = Packed[T]()
        for each in some:
            each._close()
            whole._blocks += each._blocks
        return whole.as_list()

    def as_list(self) -> list[T]:
        """The list, for an answer that is encoded and not read: JSON stands for it."""
        self._close()
        blocks = Blocks(self._blocks)
        light = blocks.bytes < LIGHT * CHARACTERS
        return cast(list[T], msgspec.Raw(b"[" + b",".join(self._blocks) + b"]") if light else blocks)


def weight(value: object) -> int:
    """Roughly how many values `value` holds."""
    if isinstance(value, msgspec.Raw):
        return 1 + memoryview(value).nbytes // CHARACTERS
    if isinstance(value, Blocks):
        return 1 + value.bytes // CHARACTERS
    if isinstance(value, str):
        return 1 + len(value) // CHARACTERS
    if isinstance(value, msgspec.Struct):
        return 1 + sum(weight(getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, list | tuple) and value:
        if isinstance(value[0], int | float):
            return 1 + len(value)
        if len(value) > FEW:
            some = sum(weight(value[place * len(value) // FEW]) for place in range(FEW))
            return 1 + some * len(value) // FEW
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
    elif isinstance(value, Blocks):
        yield from value
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
            self.body = _sent(parts)
        return await super().prepare(request)


async def _sent(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    """`parts` in blocks; others have a turn of the event loop between two."""
    waiting: list[bytes] = []
    size = 0
    for part in parts:
        for first in range(0, len(part), BLOCK):
            block = part[first : first + BLOCK]
            waiting.append(block)
            size += len(block)
            if size >= BLOCK:
                yield b"".join(waiting)
                waiting, size = [], 0
                await asyncio.sleep(0)
    if waiting:
        yield b"".join(waiting)
