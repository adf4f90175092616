"""Writes tensors as a safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from coserve.lora.files.tensorfile_writer import Array, write_arrays


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write contiguous tensors on the CPU, fp32 or uint8, to a new file: see `write_arrays`."""

    def data(name: str) -> Array:
        tensor = tensors[name]
        assert tensor.is_contiguous() and tensor.device.type == "cpu", name
        return cast("Array", tensor.detach().numpy())

    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    write_arrays(path, shapes, data, metadata, uint8={name for name, t in tensors.items() if t.dtype == torch.uint8})
