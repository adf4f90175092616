"""MXFP4 experts, as in gpt-oss: 4-bit floats (e2m1) in blocks of 32 that share an exponent (OCP Microscaling Formats
1.0)."""

from __future__ import annotations

import torch
from torch import Tensor

from coserve.model.formats.interface import Format, Parts, Settings

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The number that each 4-bit code stands for."""
BIAS = 127


def mxfp4(settings: Settings) -> Format:
    """Experts (E, I, O) are stored transposed: `_blocks` (E, O, I / 32, 16), two numbers a byte, the first in the low
    bits; `_scales` (E, O, I / 32), exponents of 2 with a bias of 127."""
    return Format("mxfp4", "_blocks", ("_scales",), _dequantize, dense="")


def _dequantize(parts: Parts) -> Tensor:
    """In bfloat16, which holds all these numbers, and expert by expert: the experts of a layer may take GBs."""
    blocks, scales = parts["_blocks"], parts["_scales"]
    values = torch.tensor(VALUES, device=blocks.device)
    experts, outputs, groups, half = blocks.shape
    found = torch.empty(experts, groups * half * 2, outputs, dtype=torch.bfloat16, device=blocks.device)
    for dense, codes, exponents in zip(found, blocks, scales, strict=True):
        numbers = torch.stack([values[(codes & 15).int()], values[(codes >> 4).int()]], -1).flatten(-2)
        dense.copy_(torch.ldexp(numbers, exponents[..., None].int() - BIAS).flatten(-2).mT)
    return found
