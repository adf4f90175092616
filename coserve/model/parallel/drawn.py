"""Random weights for `load_format: dummy`, drawn one parameter at a time and equal on every rank, so that a rank never
holds all of them."""

from __future__ import annotations

import copy
import hashlib

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class DrawnWeights:
    """A model's own random initialisation, parameter by parameter, as a function of seed and name."""

    def __init__(self, model: PreTrainedModel, device: torch.device, seed: int) -> None:
        """`model` is on the `meta` device and is not changed."""
        self._model, self._device, self._seed = model, device, seed

    def get(self, name: str, shape: torch.Size) -> Tensor:
        """Return the whole parameter."""
        path, _, leaf = name.rpartition(".")
        owner = self._model.get_submodule(path)
        drawn = copy.copy(owner)
        drawn._parameters = {
            other: None if parameter is None else nn.Parameter(torch.empty_like(parameter, device="meta"))
            for other, parameter in owner._parameters.items()
        }
        dtype = owner.get_parameter(leaf).dtype
        tensor = nn.Parameter(torch.empty(shape, dtype=dtype, device=self._device), requires_grad=False)
        drawn._parameters[leaf] = tensor
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []), torch.no_grad():
            torch.manual_seed(int.from_bytes(digest, "little") >> 1)
            self._model._init_weights(drawn)
        return tensor

    def has(self, name: str) -> bool:
        """Whether a buffer is stored: none is."""
        return False
