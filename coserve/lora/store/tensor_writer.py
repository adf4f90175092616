"""Writes tensors as a safetensors file, and mappings that make their values when they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor

from coserve.lora.files.tensorfile_writer import Array, write_arrays

V = TypeVar("V")


class OnDemand(Mapping[str, V], Generic[V]):
    """A mapping whose values are made whenever they are read, and not kept: its reader decides how many there are at a
    time."""

    def __init__(self, names: Mapping[str, object], make: Callable[[str], V]) -> None:
        self._names, self._make = names, make

    def __getitem__(self, name: str) -> V:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class TensorsOnDemand(OnDemand[Tensor]):
    """Tensors that are made whenever they are read. `like`: their shapes and dtypes, on the meta device."""

    def __init__(self, like: Mapping[str, Tensor], make: Callable[[str], Tensor]) -> None:
        super().__init__(like, make)
        self.like = like


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write contiguous tensors on the CPU, fp32 or uint8, to a new file: see `write_arrays`. Each is read once, and
    none is kept."""

    def data(name: str) -> Array:
        tensor = tensors[name]
        assert tensor.is_contiguous() and tensor.device.type == "cpu", name
        return cast("Array", tensor.detach().numpy())

    like = tensors.like if isinstance(tensors, TensorsOnDemand) else tensors
    shapes = {name: tuple(tensor.shape) for name, tensor in like.items()}
    write_arrays(path, shapes, data, metadata, uint8={name for name, t in like.items() if t.dtype == torch.uint8})
