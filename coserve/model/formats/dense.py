"""The weights of a quantised checkpoint as dense tensors, dequantised one at a time when they are read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import EllipsisType

import torch
from torch import Tensor

from coserve.core.errors import UnsupportedBase
from coserve.model.formats.files import Slices, StoredTensors
from coserve.model.formats.interface import Format

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_MADE = threading.Lock()
"""Held while one tensor is dequantised: transformers reads on several threads, each of which would need memory."""


@dataclass(frozen=True)
class DenseTensor:
    """One parameter's dense tensor, made anew by each read."""

    name: str
    make: Callable[[], Tensor]
    shape: torch.Size | None = None
    """The shape to expect; None: any."""

    def __getitem__(self, index: slice | tuple[slice, ...] | EllipsisType) -> Tensor:
        """Raises `UnsupportedBase` for a tensor that cannot be made, or has another shape."""
        with _MADE:
            found = self.make()
            if self.shape is not None and found.shape != self.shape:
                raise UnsupportedBase(f"expected {self.name} of shape {list(self.shape)}, got {list(found.shape)}")
            return found[index].contiguous()


Tensors = Mapping[str, Slices] | Mapping[str, DenseTensor]
"""The tensors of a checkpoint by name; a slice of one reads only that slice, unless it is quantised."""


@contextmanager
def open_folder(folder: Path, form: Format | None, device: torch.device) -> Iterator[Tensors]:
    """Open a folder's weights. `form`: how they are quantised, and `device`: where to dequantise them."""
    with StoredTensors(folder) as stored:
        yield stored if form is None else DenseTensors(stored, form, device)


class DenseTensors(Mapping[str, DenseTensor]):
    """All parameters of a folder's files, by their names in the dense checkpoint of the same model."""

    def __init__(self, stored: StoredTensors, form: Format, device: torch.device) -> None:
        """`device`: where to dequantise. Raises `UnsupportedBase` if no weight is stored in the format."""
        self._form, self._device, self._folder = form, device, stored.folder.name
        self._parts: dict[str, dict[str, Slices]] = {}
        quantised = 0
        for name in stored:
            path = name.removesuffix(form.main)
            others = {suffix: stored[path + suffix] for suffix in form.others if path + suffix in stored}
            if name.endswith(form.main) and (others or form.main != form.dense):
                self._parts[path + form.dense] = {form.main: stored[name], **others}
                quantised += 1
            elif not name.endswith((*form.others, *form.unused)):
                self._parts[name] = {"": stored[name]}
        if not quantised:
            raise UnsupportedBase(f"{self._folder}: its config says {form.name}, but no weight is stored so")

    def __getitem__(self, name: str) -> DenseTensor:
        return DenseTensor(name, partial(self._read, name, self._parts[name]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def _read(self, name: str, stored: Mapping[str, Slices]) -> Tensor:
        """Return the tensor: in float32 if it was quantised, else as stored."""
        parts = {suffix: one[...].to(self._device) for suffix, one in stored.items()}
        plain, form = parts.get(""), self._form.name
        if plain is not None:
            if plain.dtype not in _FLOATS:
                raise UnsupportedBase(f"{self._folder}: {name} has {plain.dtype} numbers, but no scale of {form}")
            return plain
        try:
            return self._form.dequantize(parts)
        except KeyError as error:
            raise UnsupportedBase(f"{self._folder}: {name} has no {error.args[0]}, which {form} needs") from error
        except (RuntimeError, ValueError, IndexError) as error:
            raise UnsupportedBase(f"{self._folder}: {name} cannot be read as {form}: {error}") from error
