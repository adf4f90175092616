"""Writes safetensors files tensor by tensor, straight from their memory. No torch.

The library's own writer first gathers the file's bytes in Python objects, and holds the interpreter's lock for tens of milliseconds
meanwhile. Here the system's writes take the tensors as they lie, without the lock, and one tensor at a time is enough.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path

import numpy as np
import numpy.typing as npt


def write_float32(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    data: Callable[[str], npt.NDArray[np.float32]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write contiguous fp32 tensors to a new file; `data` is called for each, in order of their names. Not durable: the caller syncs.

    Header and data are in the order of the names, as the library has them, and so is the metadata: equal tensors get equal
    bytes.
    """
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name, shape in sorted(shapes.items()):
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with path.open("xb", buffering=0) as file:
        _write(file, memoryview(len(text).to_bytes(8, "little") + text))
        for name in sorted(shapes):
            array = data(name)
            assert array.dtype == np.float32 and array.shape == shapes[name] and array.flags.c_contiguous, name
            _write(file, array.reshape(-1).data.cast("B"))


def _write(file: FileIO, data: memoryview) -> None:
    while data:  # one call writes 2 GiB at most
        data = data[file.write(data) :]
