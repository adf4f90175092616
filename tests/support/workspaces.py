"""Temporary memory of GPU kernels, which no tensor of the program shows. Taken from torch's sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

PRODUCTS = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::bmm": (0, 1)}
"""Positions of the factors among an op's arguments."""
PACKED_BACKWARD = "aten::_flash_attention_backward"
RECTANGULAR_BACKWARD = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
"""Stand-in for the GPU's backward: flash attention in 16 bits, memory-efficient attention in 32."""
QUERY_BLOCK = 128
"""Flash attention's backward rounds each sequence's queries up to a multiple of this."""


def workspace_bytes(op: str, args: Sequence[Any]) -> int:
    """Bytes of the op's temporaries on a GPU."""
    if op in PRODUCTS:
        return sum(_copied(args[place]) for place in PRODUCTS[op])
    if op == PACKED_BACKWARD:
        q, k, sequences = args[1], args[2], args[6].shape[0] - 1
        tokens, heads, width = q.shape
        return _flash_backward(tokens + QUERY_BLOCK * sequences, heads, k.shape[1], k.shape[0], width, k.element_size())
    if op == RECTANGULAR_BACKWARD:
        q, k = args[1], args[2]
        batch, heads, tokens, width = q.shape
        if q.dtype == torch.float32:  # the product of the output and its gradient, and its sums over the width
            return 4 * int(batch * heads * tokens * (width + 1))
        padded = -(-tokens // QUERY_BLOCK) * QUERY_BLOCK
        return _flash_backward(batch * padded, heads, k.shape[1], batch * k.shape[2], width, k.element_size())
    return 0


def _copied(factor: Tensor) -> int:
    """Bytes of a factor that torch copies. cuBLAS reads matrices with dense rows or columns; others, such as the
    gradient of a sum, are copied."""
    rows, columns = factor.stride()[-2:]
    height, width = factor.shape[-2:]
    dense = (columns == 1 and rows >= max(1, width)) or (rows == 1 and columns >= max(1, height))
    return 0 if dense else factor.numel() * factor.element_size()


def _flash_backward(queries: int, heads: int, kv_heads: int, keys: int, width: int, itemsize: int) -> int:
    """Bytes of the fp32 sums of dQ and of the softmax's rows, and, if query heads share keys, of dK and dV for each
    query head."""
    wide = -(-width // (32 if width <= 128 else 64)) * (32 if width <= 128 else 64)
    sums = 4 * queries * heads * (wide + 1)
    return sums + (2 * keys * heads * width * itemsize if heads != kv_heads else 0)
