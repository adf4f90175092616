"""The parameters of a base in its files, by the names of the model's parameters."""

from __future__ import annotations

from dataclasses import replace

import torch

from coserve.core.errors import UnsupportedBase
from coserve.model.formats.dense import DenseTensor, Tensors
from coserve.model.parallel.partition import Lazy


class Checkpoint:
    """Finds a rank's parameters among the tensors of a checkpoint."""

    def __init__(self, tensors: Tensors, prefix: str, name: str) -> None:
        """`prefix`: name of the decoder in the model (`base_model_prefix`), which the tensors' names may lack. `name`:
        the base's, for messages."""
        self._tensors, self._prefix, self._name = tensors, f"{prefix}.", name

    def get(self, name: str, shape: torch.Size) -> Lazy:
        """Return a parameter; a slice of it reads only that slice, unless it is quantised. Raises `UnsupportedBase` if
        it is missing or has another shape."""
        stored = next((own for own in (name, name.removeprefix(self._prefix)) if own in self._tensors), None)
        if stored is None:
            raise UnsupportedBase(f"{self._name}: its files have no {name}")
        found = self._tensors[stored]
        if isinstance(found, DenseTensor):
            return replace(found, shape=shape)
        if list(shape) != found.get_shape():
            raise UnsupportedBase(f"{self._name}: expected {name} of shape {list(shape)}, got {found.get_shape()}")
        return found
