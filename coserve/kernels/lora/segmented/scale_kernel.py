"""The kernel that scales the rows of DoRA adapters (`kernels.lora.dora`)."""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["O", "stride", "row"], do_not_specialize_on_alignment=["y_ptr", "bias_ptr", "scales_ptr"]
)
def scale(
    y_ptr,
    bias_ptr,
    tiles_ptr,
    scales_ptr,
    O,
    stride,
    row,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BIASED: tl.constexpr,
):
    """`y = scale (y - bias) + bias` in fp32, in place. Grid (output blocks, tiles). y (T, O): rows `stride` apart; bias
    (O), unused unless `BIASED`. `scales_ptr`: int64 (slots, `row`), addresses of a site's fp32 vectors (O); 0: none."""
    tile = tiles_ptr + tl.program_id(1) * 4
    first, rows, slot = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    address = tl.load(scales_ptr + slot.to(tl.int64) * row, mask=(slot >= 0) & (rows > 0), other=0)
    if address != 0:
        t, o = tl.arange(0, BLOCK_T), tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
        at = y_ptr + (first + t)[:, None] * stride + o[None, :]
        keep = (t < rows)[:, None] & (o < O)[None, :]
        factor = tl.load(address.to(tl.pointer_type(tl.float32)) + o, mask=o < O, other=1.0)
        y = tl.load(at, mask=keep, other=0.0).to(tl.float32)
        if BIASED:
            bias = tl.load(bias_ptr + o, mask=o < O, other=0.0).to(tl.float32)
            y = (y - bias[None, :]) * factor[None, :] + bias[None, :]
        else:
            y = y * factor[None, :]
        tl.store(at, y.to(y_ptr.dtype.element_ty), mask=keep)
