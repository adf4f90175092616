"""Mooncake's traces (Qin et al., FAST 2025): JSON lines, times in milliseconds, lengths in tokens, hashes of the
prompt's blocks.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}

Prompts that begin with the same hashes begin with the same 512-token blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from coserve.workloads.formats.lines import (
    JSON_ERRORS,
    MAX_TOKENS,
    Recorded,
    check_order,
    not_json,
    read_lines,
    reading,
)

_Tokens = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: tuple[int, ...] = ()


def read_mooncake(path: Path) -> Iterator[Recorded]:
    """Yield the requests. Raises `MalformedRow` with the line, `InvalidRequest` for a missing file."""
    decoder, before = msgspec.json.Decoder(_Line), 0.0
    with reading(path):
        for number, line in read_lines(path):
            try:
                found = decoder.decode(line)
            except JSON_ERRORS as error:
                raise not_json(error, number) from error
            at = found.timestamp / 1000
            check_order(at, before, number)
            before = at
            yield Recorded(at, found.input_length, found.output_length, found.hash_ids)
