"""Asynchronous copies between host and device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor


def send(host: Tensor, device: torch.device) -> Tensor:
    """Return a device copy, made asynchronously."""
    if device.type == "cuda" and not host.is_pinned():
        host = host.pin_memory()  # from torch's own pool, which keeps it until the copy has ended
    return host.to(device, non_blocking=True)


def send_ids(device: torch.device, *columns: Sequence[int]) -> list[Tensor]:
    """Send int64 columns in one copy."""
    flat = np.fromiter(chain.from_iterable(columns), np.int64)  # faster than `torch.tensor`
    return list(torch.split(send(torch.from_numpy(flat), device), [len(column) for column in columns]))


def fetch(tensor: Tensor) -> Tensor:
    """Return a host copy, complete once the stream has reached it."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)
