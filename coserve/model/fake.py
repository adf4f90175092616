"""Fake tensors: shapes and lifetimes without contents, to predict memory use. Checks of values skip them."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor, or the one that a parameter wraps, is fake."""
    return isinstance(tensor, FakeTensor)
