"""Encodes responses as JSON. Long lists are encoded as their entries arrive, because one encoder call holds the GIL,
and so the event loop, to its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar, cast

import msgspec

BLOCK = 1 << 16
"""Bytes of encoded entries that are joined at once."""
_PLACE = b"\0"
"""Placeholder for a list that is encoded already: JSON never contains this byte."""

T = TypeVar("T")


class _EncodedList:
    """A list's entries as JSON, in blocks without brackets."""

    def __init__(self, blocks: Sequence[bytes]) -> None:
        self.blocks = blocks


class JsonListBuilder(Generic[T]):
    """Builds a JSON list, encoding entries as they are added."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._parts: list[bytes] = []
        self._open = 0
        """Number of bytes in `_parts`."""

    def add(self, entries: Sequence[T], /) -> None:
        if entries:
            self._parts.append(msgspec.json.encode(entries)[1:-1])
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
        blocks: list[bytes] = []
        for each in some:
            each._close()
            blocks += each._blocks
        return cast(list[T], _EncodedList(blocks))

    def as_list(self) -> list[T]:
        """Return the list as a value that only `encode_json` can read."""
        return self.joined([self])


def encode_json(value: object) -> list[bytes]:
    """Return the JSON of `value` in parts to be joined. Lists from `JsonListBuilder` are not copied, but are parts of
    their own."""
    lists: list[_EncodedList] = []

    def insert_later(found: object) -> msgspec.Raw:
        if not isinstance(found, _EncodedList):
            raise NotImplementedError(f"expected a value that JSON can encode, got {type(found)}")
        lists.append(found)
        return msgspec.Raw(_PLACE)

    first, *rest = msgspec.json.encode(value, enc_hook=insert_later).split(_PLACE)
    parts = [first]
    for each, following in zip(lists, rest, strict=True):
        parts.append(b"[")
        for index, block in enumerate(each.blocks):
            parts += (b",", block) if index else (block,)
        parts.append(b"]" + following)
    return parts
