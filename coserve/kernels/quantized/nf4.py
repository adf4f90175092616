"""NF4 weights: QLoRA's 4-bit NormalFloat (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314, section 3).

    W[o, d] = absmax[o, d // 64] CODE[codes[o, d]]

The numbers and their order in memory are those of bitsandbytes' `Linear4bit` (`nf4`, blocks of 64, without double
quantisation): two codes a byte, the first in the high bits.

Letters: D inputs, O outputs.
"""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201 - a kernel's arguments have the types of its launch

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from coserve.kernels.gpu.launcher import Launcher, launches
from coserve.kernels.gpu.rounding import cdiv

BLOCK = 64
"""Weights that share a scale; D is a multiple of it."""
CODE = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The 16 values of NF4 (QLoRA, appendix E)."""
BYTES = 2048
"""Bytes of codes a program of `expand` reads."""


@triton.jit
def expand(codes_ptr, absmax_ptr, table_ptr, w_ptr, count, BYTES: tl.constexpr):
    """Grid (blocks of BYTES): codes uint8 (count), absmax fp32 (count / 32), table fp32 (16) -> w (2 count)."""
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    real = at < count
    pair = tl.load(codes_ptr + at, mask=real, other=0).to(tl.int32)
    absmax = tl.load(absmax_ptr + at // 32, mask=real, other=0.0)
    first = tl.load(table_ptr + (pair >> 4)) * absmax
    second = tl.load(table_ptr + (pair & 15)) * absmax
    both = tl.interleave(first, second).to(w_ptr.dtype.element_ty)
    out = tl.program_id(0).to(tl.int64) * (2 * BYTES) + tl.arange(0, 2 * BYTES)
    tl.store(w_ptr + out, both, mask=out < 2 * count)


_expand = Launcher(expand)


@cache
def _table(device: torch.device) -> Tensor:
    return torch.tensor(CODE, dtype=torch.float32, device=device)


def quantize(weight_OD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes, uint8 (O, D / 2), and the largest magnitude of each block, fp32 (O, D / 64)."""
    rows, inputs = weight_OD.shape
    blocks = weight_OD.float().view(rows, inputs // BLOCK, BLOCK)
    absmax = blocks.abs().amax(2)
    table = _table(weight_OD.device)
    between = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(blocks / absmax.clamp(min=1e-30)[..., None], between, out_int32=True).to(torch.uint8)
    pairs = codes.view(rows, inputs // 2, 2)
    return pairs[..., 0] << 4 | pairs[..., 1], absmax


def expand_codes(codes: Tensor, absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """`dequantize` on a GPU, by one kernel."""
    rows, width = codes.shape
    weight = torch.empty(rows, 2 * width, dtype=dtype, device=codes.device)
    tensors, count = (codes, absmax, _table(codes.device), weight), codes.numel()
    _expand((cdiv(count, BYTES), 1, 1), tensors, (count,), BYTES=BYTES)
    return weight


def dequantize(codes: Tensor, absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight (O, D), by one kernel on a GPU."""
    if launches(codes):
        return expand_codes(codes, absmax, dtype)
    rows, inputs = codes.shape[0], 2 * codes.shape[1]
    pairs = torch.stack((codes >> 4, codes & 15), -1).view(rows, inputs // BLOCK, BLOCK)
    return (_table(codes.device)[pairs.int()] * absmax[..., None]).view(rows, inputs).to(dtype)
