"""Encodes large JSON responses in blocks, because one encoder call holds the GIL, and so the event loop, to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Generic, TypeVar, cast

import msgspec
from aiohttp import web
from msgspec import UNSET

JSON = "application/json"
VALUES_AT_ONCE = 4096
"""Values that are encoded at once: a few milliseconds at most."""
CHARACTERS = 64
"""Characters of text that cost as much to encode as one value."""
SAMPLED_ENTRIES = 1024
"""Entries of a list that are counted; a longer list is sampled at this many evenly spaced entries."""
BLOCK = 1 << 16
"""Bytes that are joined, copied or sent at once."""

T = TypeVar("T")


class JsonBlocks:
    """A JSON list that is too large for one `Raw`: its entries without brackets, in blocks of whole entries."""

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


def _encode_blocks(value: object) -> msgspec.Raw:
    if not isinstance(value, JsonBlocks):
        raise NotImplementedError(f"expected a value that JSON can encode, got {type(value)}")
    return msgspec.Raw(b"".join(value))


_encoder = msgspec.json.Encoder(enc_hook=_encode_blocks)


class JsonListBuilder(Generic[T]):
    """Builds a JSON list, encoding entries as they are added."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._parts: list[bytes] = []
        self._open = 0
        """Number of bytes in `_parts`."""

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
    def joined(some: Iterable[JsonListBuilder[T]]) -> list[T]:
        """Return the lists of several builders as one, in order: see `as_list`."""
        whole = JsonListBuilder[T]()
        for each in some:
            each._close()
            whole._blocks += each._blocks
        return whole.as_list()

    def as_list(self) -> list[T]:
        """Return the list as JSON; only for a response that is encoded and not read."""
        self._close()
        blocks = JsonBlocks(self._blocks)
        small = blocks.bytes < VALUES_AT_ONCE * CHARACTERS
        return cast(list[T], msgspec.Raw(b"[" + b",".join(self._blocks) + b"]") if small else blocks)


def count_values(value: object) -> int:
    """Return roughly how many values `value` holds."""
    if isinstance(value, msgspec.Raw):
        return 1 + memoryview(value).nbytes // CHARACTERS
    if isinstance(value, JsonBlocks):
        return 1 + value.bytes // CHARACTERS
    if isinstance(value, str):
        return 1 + len(value) // CHARACTERS
    if isinstance(value, msgspec.Struct):
        return 1 + sum(count_values(getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, list | tuple) and value:
        if isinstance(value[0], int | float):
            return 1 + len(value)
        if len(value) > SAMPLED_ENTRIES:
            some = sum(count_values(value[index * len(value) // SAMPLED_ENTRIES]) for index in range(SAMPLED_ENTRIES))
            return 1 + some * len(value) // SAMPLED_ENTRIES
        return 1 + sum(map(count_values, value))
    if isinstance(value, dict):
        return 1 + sum(1 + count_values(entry) for entry in value.values())
    return 1


def encode_in_chunks(value: object) -> Iterator[bytes]:
    """Yield the bytes of `msgspec.json.encode(value)`, in chunks of about `VALUES_AT_ONCE` values."""
    large = count_values(value) > VALUES_AT_ONCE
    if large and isinstance(value, msgspec.Struct) and not value.__struct_config__.omit_defaults:
        start = b"{"
        for field in msgspec.structs.fields(type(value)):
            if (entry := getattr(value, field.name)) is not UNSET:
                yield start + _encoder.encode(field.encode_name) + b":"
                yield from encode_in_chunks(entry)
                start = b","
        yield b"}" if start == b"," else b"{}"
    elif large and isinstance(value, list | tuple) and value:
        start = b"["
        for group in _groups(value):
            yield start
            if len(group) > 1:
                yield _encoder.encode(group)[1:-1]
            else:
                yield from encode_in_chunks(group[0])
            start = b","
        yield b"]"
    elif isinstance(value, JsonBlocks):
        yield from value
    elif isinstance(value, msgspec.Raw):
        yield bytes(value)
    else:
        yield _encoder.encode(value)


def _groups(values: Sequence[object]) -> Iterator[Sequence[object]]:
    """Yield groups of consecutive entries with about `VALUES_AT_ONCE` values in all; a larger entry is its own
    group."""
    if isinstance(values[0], int | float):
        yield from (values[first : first + VALUES_AT_ONCE] for first in range(0, len(values), VALUES_AT_ONCE))
        return
    first, total = 0, 0
    for index, value in enumerate(values):
        own = count_values(value)
        if index > first and total + own > VALUES_AT_ONCE:
            yield values[first:index]
            first, total = index, 0
        total += own
    yield values[first:]


class LargeJsonResponse(web.Response):
    """Response that encodes its body when it is sent, and yields to the event loop between chunks."""

    def __init__(self, value: object, status: int) -> None:
        super().__init__(status=status, content_type=JSON)
        self._value = value

    async def prepare(self, request: web.BaseRequest) -> object:  # type: ignore[override]
        if not self.prepared:
            parts = []
            for part in encode_in_chunks(self._value):
                parts.append(part)
                await asyncio.sleep(0)
            self.body = _sent(parts)
        return await super().prepare(request)


async def _sent(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Yield `parts` in blocks, yielding to the event loop between them."""
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
