"""Writes safetensors files straight from tensors' memory.

The library's own writer first gathers the file's bytes in Python objects, and holds the interpreter's lock for tens of milliseconds
meanwhile. Here the system's writes take the tensors as they lie, without the lock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write contiguous fp32 tensors on the CPU to a new file. Not durable: the caller syncs.

    Header and data are in the order of the names, as the library has them, and so is the metadata: equal tensors get equal
    bytes.
    """
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name, tensor in sorted(tensors.items()):
        assert tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.device.type == "cpu", name
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with path.open("xb", buffering=0) as file:
        _write(file, memoryview(len(text).to_bytes(8, "little") + text))
        for name in sorted(tensors):
            _write(file, tensors[name].detach().flatten().numpy().data.cast("B"))


def _write(file: FileIO, data: memoryview) -> None:
    while data:  # one call writes 2 GiB at most
        data = data[file.write(data) :]
