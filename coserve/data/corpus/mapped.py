"""Memory-maps the arrays of a safetensors file. No torch.

The safetensors library copies what it reads, so this reads the format itself: eight bytes with the header's size, the
header as JSON, the arrays' bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from coserve.core.cancellation import unchecked
from coserve.core.validation import decoder_of

DTYPES: dict[str, type[np.number[Any]]] = {"I32": np.int32, "U8": np.uint8, "I64": np.int64, "F32": np.float32}
MAX_HEADER = 1 << 16
BLOCK = 1 << 20
"""Bytes read at once."""


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int]
    data_offsets: tuple[int, int]


def map_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Map a file's one-dimensional arrays, read-only, each in its stored dtype (int32, uint8, int64 or fp32).

    Raises `OSError`; `ValueError` for a file that is truncated or has no such arrays.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(MAX_HEADER, size - 8):
            raise ValueError("no header")
        header = decoder_of(dict[str, _Entry]).decode(file.read(length))
        data = 8 + length
        if max((entry.data_offsets[1] for entry in header.values()), default=0) != size - data:
            raise ValueError("the file is not whole")
        return {name: _mapped(path, entry, data) for name, entry in header.items()}


def _mapped(path: Path, entry: _Entry, data: int) -> npt.NDArray[Any]:
    dtype, (start, stop), (count,) = DTYPES.get(entry.dtype), entry.data_offsets, entry.shape
    if dtype is None or start < 0 or count < 1 or stop - start != count * np.dtype(dtype).itemsize:
        raise ValueError("an array's size is wrong")
    return np.asarray(np.memmap(path, dtype, "r", data + start, (count,)))


def file_digest(path: Path, check: Callable[[], None] = unchecked) -> str:
    """Return a file's SHA-256, hex. `check` is called between reads and may raise. Raises `OSError`."""
    digest, block = hashlib.sha256(), bytearray(BLOCK)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            check()
            digest.update(memoryview(block)[:count])
    return digest.hexdigest()
