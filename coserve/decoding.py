"""JSON decoders of msgspec types, for code that several threads run.

msgspec prepares a Struct type, and those of its fields, at the first use. A second thread that uses one of them meanwhile reads what is not there yet, and the
process ends (msgspec 0.22, SIGSEGV). So types that threads decode are prepared here, one after another.
"""

from __future__ import annotations

from threading import Lock
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_lock = Lock()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def decoder_of(type: type[T]) -> msgspec.json.Decoder[T]:
    """Always the same one. After the call `msgspec.convert` and decoders of other formats may use the type on any thread, too."""
    with _lock:
        if (found := _decoders.get(type)) is None:
            found = _decoders[type] = msgspec.json.Decoder(type)
    return found
