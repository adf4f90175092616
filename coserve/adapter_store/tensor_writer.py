"""Writes tensors as a safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coserve.adapters.tensorfile_writer import write_float32


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write contiguous fp32 tensors on the CPU to a new file: see `write_float32`."""

    def data(name: str) -> npt.NDArray[np.float32]:
        tensor = tensors[name]
        assert tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.device.type == "cpu", name
        return cast("npt.NDArray[np.float32]", tensor.detach().numpy())

    write_float32(path, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, data, metadata)
