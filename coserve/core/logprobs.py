"""Log-probabilities of tokens: one, and many packed as bytes for the link and for queues in the API process.

There may be millions (20 pairs per token). As Python objects, each full garbage collection would visit all of them and
block the event loop meanwhile.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import msgspec

_HEAD = struct.Struct("<dH")
BYTES_PER_TOP = 12


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural-log probability of the chosen token, and `(token, logprob)` of the most likely tokens."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PackedLogprobs(msgspec.Struct, frozen=True):
    """A sequence of `TokenLogprob`s; iterating unpacks them one by one.

    Layout of an entry, little endian: logprob (f64), length of `top` (u16), the ids of `top` (i32), their logprobs
    (f64).
    """

    count: int = 0
    data: bytes = b""

    @classmethod
    def of(cls, entries: Iterable[TokenLogprob]) -> PackedLogprobs:
        parts = [_packed(entry) for entry in entries]
        return cls(len(parts), b"".join(parts))

    @classmethod
    def joined(cls, parts: Iterable[PackedLogprobs]) -> PackedLogprobs:
        parts = list(parts)
        return cls(sum(part.count for part in parts), b"".join(part.data for part in parts))

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[TokenLogprob]:
        at = 0
        for _ in range(self.count):
            logprob, size = _HEAD.unpack_from(self.data, at)
            flat = struct.unpack_from(f"<{size}i{size}d", self.data, at + _HEAD.size)
            at += _HEAD.size + BYTES_PER_TOP * size
            yield TokenLogprob(logprob, tuple(zip(flat[:size], flat[size:], strict=True)))


def _packed(entry: TokenLogprob) -> bytes:
    size = len(entry.top)
    ids, values = zip(*entry.top, strict=True) if size else ((), ())
    return _HEAD.pack(entry.logprob, size) + struct.pack(f"<{size}i{size}d", *ids, *values)
