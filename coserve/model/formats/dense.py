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
    """Open a folder's weights, by their names in a dense checkpoint. `form`: how they are quantised, and `device`:
    where to dequantise them. Raises `UnsupportedBase` if no weight is stored in the format."""
    with StoredTensors(folder) as stored:
        yield stored if form is None else _dense_tensors(stored, form, device)


def _dense_tensors(stored: StoredTensors, form: Format, device: torch.device) -> dict[str, DenseTensor]:
    found, folder, quantised = dict[str, dict[str, Slices]](), stored.folder.name, False
    for name in stored:
        path = name.removesuffix(form.main)
        others = {suffix: stored[path + suffix] for suffix in form.others if path + suffix in stored}
        if name.endswith(form.main) and (others or form.main != form.dense):
            found[path + form.dense] = {form.main: stored[name], **others}
            quantised = True
            continue
        owner = next((name.removesuffix(one) + form.main for one in form.others if name.endswith(one)), None)
        if owner in stored or name.endswith(form.unused):
            continue
        if owner is not None and form.main:
            raise UnsupportedBase(f"{folder}: {name} has no {owner}; {form.name} is read only where it scales weights")
        found[name] = {"": stored[name]}
    if not quantised:
        raise UnsupportedBase(f"{folder}: its config says {form.name}, but no weight is stored so")

    def read(name: str) -> Tensor:
        """Return the tensor: in float32 if it was quantised, else as stored."""
        parts = {suffix: one[...].to(device) for suffix, one in found[name].items()}
        if list(parts) == [""]:
            plain = parts[""]
            if plain.dtype not in _FLOATS:
                raise UnsupportedBase(f"{folder}: {name} has {plain.dtype} numbers, but no scale of {form.name}")
            return plain
        try:
            return form.dequantize(parts)
        except KeyError as error:
            raise UnsupportedBase(f"{folder}: {name} has no {error.args[0]}, which {form.name} needs") from error
        except (RuntimeError, ValueError, IndexError) as error:
            raise UnsupportedBase(f"{folder}: {name} cannot be read as {form.name}: {error}") from error

    return {name: DenseTensor(name, partial(read, name)) for name in found}
