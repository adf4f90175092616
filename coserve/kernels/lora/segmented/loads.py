"""How the segmented kernels read adapter weights through the slot table."""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weights(addresses_ptr, entry, which, like_ptr):
    """Pointer to a_RD (`which` 0) or b_OR (1) of a (slot, site) entry, typed as `like_ptr`; 16-byte aligned."""
    address = tl.load(addresses_ptr + entry * 2 + which)
    return tl.multiple_of(address.to(like_ptr.dtype), 16)


@triton.jit
def waits(idle):
    """Whether this program waits for the preceding kernel. The first program always does, so that a kernel's end implies the
    end of the preceding ones. Other idle programs exit: waiting, they would occupy registers that working ones need."""
    return (not idle) | ((tl.program_id(0) + tl.program_id(1) + tl.program_id(2)) == 0)


@triton.jit
def held(tile):
    """Forces the tile to be complete, in registers. Otherwise the compiler consumes it while it loads, to save registers, and
    keeps only a few loads in flight."""
    if tile.dtype.primitive_bitwidth == 16:
        tile = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=2)
    elif tile.dtype.primitive_bitwidth == 32:
        tile = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=1)
    return tile


@triton.jit
def load_b(b_ptr, o, r, O, rank):
    """b_OR[o, r] as a (len(o), len(r)) tile, zero outside; its rows are padded to 16 bytes (`adapter_table.kernel_layout`)."""
    stride = (rank + 7) // 8 * 8
    return tl.load(b_ptr + o[:, None] * stride + r[None, :], mask=(o < O)[:, None] & (r < stride)[None, :], other=0.0)


@triton.jit
def padded(rank):
    """Ranks of h and g that are written, zeros at their end: whole vectors for any rank."""
    return (rank + 15) // 16 * 16


@triton.jit
def output(
    block, y0_ptr, y1_ptr, y2_ptr, O0, O1, O2, y0_stride, y1_stride, y2_stride,
    SITES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """(site, block within it, its y, O and stride) of a block of the sites' outputs laid side by side."""
    site = 0
    O = O0
    y_stride = y0_stride
    y_address = y0_ptr.to(tl.int64)
    if SITES > 1 and block >= tl.cdiv(O0, BLOCK_O):
        block -= tl.cdiv(O0, BLOCK_O)
        site = 1
        O = O1
        y_stride = y1_stride
        y_address = y1_ptr.to(tl.int64)
        if SITES > 2 and block >= tl.cdiv(O1, BLOCK_O):
            block -= tl.cdiv(O1, BLOCK_O)
            site = 2
            O = O2
            y_stride = y2_stride
            y_address = y2_ptr.to(tl.int64)
    y_ptr = y_address.to(y0_ptr.dtype)
    if ALIGNED:  # said again, since a choice among sites hides it from the compiler
        y_ptr = tl.multiple_of(y_ptr, 16)
        y_stride = y_stride // 8 * 8
        O = O // 8 * 8
    return site, block, y_ptr, O, y_stride
