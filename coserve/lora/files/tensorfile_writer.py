"""Writes safetensors files tensor by tensor, straight from their memory. No torch.

The library's own writer gathers the whole file as Python bytes first, and holds the GIL for tens of milliseconds. Here
the system's write calls read the tensors' memory without the GIL, and only one tensor is needed at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32] | npt.NDArray[np.uint8]
_FORMATS: Mapping[str, np.dtype[Any]] = {"F32": np.dtype(np.float32), "U8": np.dtype(np.uint8)}
"""safetensors' names of dtypes."""


def write_arrays(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    data: Callable[[str], Array],
    metadata: Mapping[str, str] | None = None,
    *,
    uint8: Collection[str] = (),
) -> None:
    """Write contiguous fp32 tensors, and those named in `uint8`, to a new file. `data` is called once per tensor, in
    order of names.

    Not durable: the caller syncs. Header, data and metadata are in the order of the names, the library's order among
    tensors of one dtype, so equal tensors get equal bytes.
    """
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(sorted(metadata.items()))}
    formats = {name: "U8" if name in uint8 else "F32" for name in shapes}
    # fp32 first, so that each tensor is aligned to its element size
    order = sorted(shapes, key=lambda name: (formats[name], name))
    end = 0
    for name in order:
        size = _FORMATS[formats[name]].itemsize * math.prod(shapes[name])
        header[name] = {"dtype": formats[name], "shape": list(shapes[name]), "data_offsets": [end, end + size]}
        end += size
    with path.open("xb", buffering=0) as file:
        _write(file, memoryview(header_bytes(header)))
        for name in order:
            array = data(name)
            expected = _FORMATS[formats[name]]
            assert array.dtype == expected and array.shape == shapes[name] and array.flags.c_contiguous, name
            _write(file, array.reshape(-1).data.cast("B"))


def header_bytes(header: Mapping[str, object]) -> bytes:
    """Return the beginning of a safetensors file: the header, padded to whole words, behind its length."""
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


def _write(file: FileIO, data: memoryview) -> None:
    while data:  # one call writes 2 GiB at most
        data = data[file.write(data) :]
