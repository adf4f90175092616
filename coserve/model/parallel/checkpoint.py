"""Reads the parameters of a base from its files, by the names of the model's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from coserve.core.errors import UnsupportedBase
from coserve.model.formats.dense import DenseTensor, Tensors
from coserve.model.formats.files import Slices
from coserve.model.parallel.partition import Lazy


class Checkpoint:
    """Finds a rank's parameters among the tensors of a checkpoint."""

    def __init__(self, tensors: Tensors, model: PreTrainedModel, name: str) -> None:
        """`model`: gives the names of the parameters. `name`: the base's, for messages."""
        self._tensors, self._prefix, self._name = tensors, f"{model.base_model_prefix}.", name
        transforms = get_model_conversion_mapping(model)
        renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        prefix, known = model.base_model_prefix, model.state_dict()
        self._names = {rename_source_key(stored, renamings, [], prefix, known)[0]: stored for stored in tensors}
        """Names in the files by those in the model, as transformers renames them."""

    def has(self, name: str) -> bool:
        """Whether the files have a tensor of this name."""
        return self._stored(name) is not None

    def get(self, name: str, shape: torch.Size) -> Lazy:
        """Return a parameter; a slice of it reads only that slice, unless it is quantised. Raises `UnsupportedBase` if
        it is missing or has another shape."""
        found = self._stored(name) or self._experts(name, shape) or self._joined(name, shape)
        if found is None:
            raise UnsupportedBase(f"{self._name}: its files have no {name}")
        if isinstance(found, StackedExperts | Tensor):
            return found
        if isinstance(found, DenseTensor):
            return replace(found, shape=shape)
        if list(shape) != found.get_shape():
            raise UnsupportedBase(f"{self._name}: expected {name} of shape {list(shape)}, got {found.get_shape()}")
        return found

    def _stored(self, name: str) -> Slices | DenseTensor | None:
        """Return the tensor of this name; it may lack the decoder's prefix."""
        found = self._names.get(name) or self._names.get(name.removeprefix(self._prefix))
        return None if found is None else self._tensors[found]

    def _experts(self, name: str, shape: torch.Size) -> StackedExperts | None:
        """Return a fused parameter of experts that the files hold expert by expert; None if they do not."""
        root, _, leaf = name.rpartition(".")
        for halves in OF_EXPERTS.get(leaf, ()):
            every = [[self._stored(f"{root}.{i}.{half}.weight") for half in halves] for i in range(shape[0])]
            parts = [[one for one in own if one is not None] for own in every]
            if all(len(own) == len(halves) for own in parts):
                sizes = shape[1] // len(halves), shape[2]
                return StackedExperts([[_checked(one, sizes, name) for one in own] for own in parts], sizes[0], shape)
        return None

    def _joined(self, name: str, shape: torch.Size) -> Tensor | None:
        """Return a convolution that the files hold in three parts (OLMo hybrid); None if they do not."""
        root, _, leaf = name.rpartition("conv1d.")
        parts = [self._stored(f"{root}{one}_conv1d.{leaf}") for one in "qkv"]
        found = [one for one in parts if one is not None and not isinstance(one, DenseTensor)]
        if len(found) < len(parts) or sum(one.get_shape()[0] for one in found) != shape[0]:
            return None
        return torch.cat([one[:] for one in found])


def _checked(part: Slices | DenseTensor, sizes: tuple[int, int], name: str) -> Slices | DenseTensor:
    if isinstance(part, DenseTensor):
        return replace(part, shape=torch.Size(sizes))
    if part.get_shape() != [*sizes]:
        raise UnsupportedBase(f"expected {name} of experts of shape {[*sizes]}, got {part.get_shape()}")
    return part


OF_EXPERTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",)),
}
"""For each fused parameter, the names in files of an expert's matrices, which are stacked by rows."""


@dataclass(frozen=True)
class StackedExperts:
    """A fused parameter (E, O, D) of matrices of single experts; a slice of it reads only that slice."""

    parts: Sequence[Sequence[Slices | DenseTensor]]
    """Each expert's matrices, to be stacked by rows."""
    rows: int
    """Rows of each matrix."""
    shape: torch.Size

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        given = index if isinstance(index, tuple) else (index,)
        experts, outputs, inputs = (*given, *[slice(None)] * (3 - len(given)))
        first, last, _ = outputs.indices(self.shape[1])
        chosen, found = self.parts[experts], torch.empty(0)
        for expert, own in enumerate(chosen):
            spans = [(max(first - i * self.rows, 0), min(last - i * self.rows, self.rows)) for i in range(len(own))]
            part = torch.cat([one[a:b, inputs] for one, (a, b) in zip(own, spans, strict=True) if a < b])
            if expert == 0:
                found = part.new_empty(len(chosen), *part.shape)
            found[expert] = part  # none is kept until all are read: together they may take GBs
        return found
