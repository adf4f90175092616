"""Fake tensors: shapes and lifetimes without contents, for predictions of memory. Checks of values leave them out."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor, or the one that a parameter holds, has no contents."""
    return isinstance(tensor, FakeTensor)
