"""Writes safetensors files tensor by tensor, straight from their memory. No torch.

The library's own writer first gathers the file's bytes in Python objects, and holds the interpreter's lock for tens of
milliseconds meanwhile. Here the system's writes take the tensors as they lie, without the lock, and one tensor at a
time is enough.
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
    """Write contiguous fp32 tensors, and those named in `uint8`, to a new file; `data` is called for each, in order of
    their names. Not
    durable: the caller syncs.

    Header and data are in the order of the names, as the library has them among tensors of one dtype, and so is the
    metadata: equal tensors get equal bytes.
    """
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(sorted(metadata.items()))}
    formats = {name: "U8" if name in uint8 else "F32" for name in shapes}
    order = sorted(
        shapes, key=lambda name: (formats[name], name)
    )  # fp32 first, so that each begins at a multiple of its element
    end = 0
    for name in order:
        size = _FORMATS[formats[name]].itemsize * math.prod(shapes[name])
        header[name] = {"dtype": formats[name], "shape": list(shapes[name]), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with path.open("xb", buffering=0) as file:
        _write(file, memoryview(len(text).to_bytes(8, "little") + text))
        for name in order:
            array = data(name)
            expected = _FORMATS[formats[name]]
            assert array.dtype == expected and array.shape == shapes[name] and array.flags.c_contiguous, name
            _write(file, array.reshape(-1).data.cast("B"))


def _write(file: FileIO, data: memoryview) -> None:
    while data:  # one call writes 2 GiB at most
        data = data[file.write(data) :]
