"""Log-probabilities of tokens packed as bytes, for the link and for queues in the API process.

There may be millions (20 pairs a token). As objects, each full garbage collection would visit them all and block the
event loop meanwhile.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import msgspec

from coserve.core.types import TokenLogprob

_HEAD = struct.Struct("<dH")
BYTES_PER_TOP = 12


class PackedLogprobs(msgspec.Struct, frozen=True):
    """`TokenLogprob`s in order; iterating makes them one by one.

    Bytes of each, little endian: the logprob (f64), how many are in `top` (u16), their token ids (i32), their values
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
        """All entries of `parts`."""
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
