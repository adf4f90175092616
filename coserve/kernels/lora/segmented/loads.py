"""Device functions by which the segmented kernels read adapter weights through the slot table."""

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
    """Whether this program waits for the preceding kernel. The first program always does, so that a kernel's end
    implies the end of the preceding ones. Other idle programs exit: waiting, they would occupy registers that working
    ones need."""
    return (not idle) | ((tl.program_id(0) + tl.program_id(1) + tl.program_id(2)) == 0)


@triton.jit
def held(tile):
    """Forces the tile to be complete, in registers. Otherwise the compiler consumes it while it loads, to save
    registers, and keeps only a few loads in flight."""
    if tile.dtype.primitive_bitwidth == 16:
        tile = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=2)
    elif tile.dtype.primitive_bitwidth == 32:
        tile = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=1)
    return tile


@triton.jit
def load_b(b_ptr, o, r, O, rank):
    """b_OR[o, r] as a (len(o), len(r)) tile, zero outside; its rows are padded to 16 bytes
    (`adapter_table.kernel_layout`)."""
    stride = (rank + 7) // 8 * 8
    return tl.load(b_ptr + o[:, None] * stride + r[None, :], mask=(o < O)[:, None] & (r < stride)[None, :], other=0.0)


@triton.jit
def shape_at(ranks_ptr, slot, row, site):
    """The shape of a (slot, site) entry, 0 for slot -1."""
    return tl.load(ranks_ptr + slot * row + site, mask=slot >= 0, other=0)


@triton.jit
def rank_of(shape):
    """The rank in an entry of the table's ranks (`types.TableEntry.shape`)."""
    return shape & 0xFFFF


@triton.jit
def a_blocks(shape):
    return ((shape >> 16) & 0xFF) + 1


@triton.jit
def b_blocks(shape):
    return (shape >> 24) + 1


@triton.jit
def row_length(width):
    """Entries from one row of a packed block-diagonal matrix to the next, its blocks `width` wide (`adapter_table`)."""
    return (width + tl.where(width % 8 == 0, 0, 14)) // 8 * 8


@triton.jit
def a_block(shape, block, D):
    """Return (first column of x, rounded down to a whole vector; entries of a row; first LoRA rank; end of the ranks)
    of a diagonal block of A."""
    blocks = a_blocks(shape)
    ranks = rank_of(shape) // blocks
    length = tl.where(blocks == 1, D, row_length(D // blocks))
    return block * (D // blocks) // 8 * 8, length, block * ranks, (block + 1) * ranks


@triton.jit
def b_block(shape, block):
    """Return (first LoRA rank, rounded down to a whole vector; entries of a row) of a diagonal block of B."""
    blocks = b_blocks(shape)
    ranks = rank_of(shape) // blocks
    length = tl.where(blocks == 1, (ranks + 7) // 8 * 8, row_length(ranks)) // 8 * 8
    return block * ranks // 8 * 8, length


@triton.jit
def within(i, own, length, BLOCKED: tl.constexpr):
    """Whether a row stores column i. It stores `length` columns, from `own` on if `BLOCKED`, else from 0. One
    comparison either way."""
    return (i - own).to(tl.uint32) < tl.cast(length, tl.uint32) if BLOCKED else i < length


@triton.jit
def a_rows(shape, r, D):
    """Return (entries of a stored row of a block-diagonal A, the column of x that row r's first entry multiplies)."""
    blocks = a_blocks(shape)
    length = tl.where(blocks == 1, D, row_length(D // blocks))
    return length, r // (rank_of(shape) // blocks) * (D // blocks) // 8 * 8


@triton.jit
def b_rows(shape, o, first, BLOCK: tl.constexpr, O):
    """Return (entries of a stored row of a block-diagonal B, the LoRA rank of row o's first entry, begin and end of the
    ranks of the rows [first, first + BLOCK))."""
    blocks = b_blocks(shape)
    ranks = rank_of(shape) // blocks
    each = O // blocks
    length = row_length(ranks)
    begin = first // each * ranks // 8 * 8
    last = (tl.minimum(first + BLOCK, O) - 1) // each * ranks // 8 * 8
    return length, o // each * ranks // 8 * 8, begin, tl.minimum(last + length, padded(rank_of(shape)))


@triton.jit
def load_b_rows(b_ptr, o, r, O, own, length, BLOCKED: tl.constexpr):
    """b_OR[o, r] as a (len(o), len(r)) tile, zero outside; row o stores the columns that `within` accepts."""
    mask = (o < O)[:, None] & within(r[None, :], own[:, None], length, BLOCKED)
    return tl.load(b_ptr + (o * length - own)[:, None] + r[None, :], mask=mask, other=0.0)


@triton.jit
def padded(rank):
    """Number of ranks of h and g that are written, the last ones as zeros: the LoRA rank rounded up to whole
    vectors."""
    return (rank + 15) // 16 * 16


@triton.jit
def h_ranks(rank, SHARDS: tl.constexpr):
    """Ranks of h that are written: rounded up to whole vectors (`padded`), unless h is in shards (`h_columns`)."""
    return rank if SHARDS > 1 else padded(rank)


@triton.jit
def h_columns(r, rank, stride, SHARDS: tl.constexpr):
    """Return the offsets of LoRA ranks r in a row of h. `SHARDS`: number of equal shards of h, `stride` entries
    apart."""
    at = r
    if SHARDS > 1:
        each = tl.maximum(rank // SHARDS, 1)
        at = r // each * stride + r % each
    return at


@triton.jit
def output(block, ys, Os, y_strides, SITES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_O: tl.constexpr):
    """Return (site, block within the site, its y, O and stride of y) for a block of the sites' outputs laid side by
    side. `ys`, `Os`, `y_strides`: one for each of three sites."""
    y0_ptr, y1_ptr, y2_ptr = ys
    O0, O1, O2 = Os
    y0_stride, y1_stride, y2_stride = y_strides
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
    if ALIGNED:  # repeats a hint that the choice of a site hides from the compiler
        y_ptr = tl.multiple_of(y_ptr, 16)
        y_stride = y_stride // 8 * 8
        O = O // 8 * 8
    return site, block, y_ptr, O, y_stride
