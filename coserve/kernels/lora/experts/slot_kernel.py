"""The kernels of experts' LoRA terms in serving: x Aᵀ, and its product with B, added in place.

    shrink  h[split, s, r] = Σ_{d in split} A[r, d] x[s, d]
    expand  y[s, o] += scaling Σ_r B[o, r] Σ_split h[split, s, r]

The rows of a call are sorted by expert and slot. Each row has its programs. They compute a tile of up to `BLOCK_S`
consecutive rows of one expert and slot if it begins at their row; otherwise they exit at once. So one launch serves any
number of adapters and experts, its size depends only on the number of rows, and each used pair is read once per
`BLOCK_S` rows.

The time goes into reading pairs, most of which few rows have chosen. So matrices begin at multiples of `ALIGN` bytes,
and the compiler is told so: otherwise it would read single elements. A program reads little, all of it at once. Rows
are the narrow side of each product, and each warp has inputs of its own (`decode_kernel`). `PDL`: `expand` may start
before `shrink` has ended, and reads B meanwhile.
"""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl

from coserve.kernels.lora.segmented.loads import held, waits

_SCALARS = ("slots_ptr", "tokens_ptr", "experts_ptr", "ranks_ptr", "scales_ptr")
"""Pointers to numbers that are read one by one. Triton does not specialise on their alignment, so another alignment
causes no compilation."""


@triton.jit
def _tile(slots_ptr, tokens_ptr, experts_ptr, E, BLOCK_S: tl.constexpr):
    """Return the program's row, its slot and expert, and whether a tile begins there: the previous row is in another
    tile, and this one has a slot and one of the E experts."""
    first = tl.program_id(0)
    inner = (first % BLOCK_S) != 0
    token, expert = tl.load(tokens_ptr + first), tl.load(experts_ptr + first)
    token_before = tl.load(tokens_ptr + first - 1, mask=inner, other=0)
    expert_before = tl.load(experts_ptr + first - 1, mask=inner, other=-1)
    slot, slot_before = tl.load(slots_ptr + token), tl.load(slots_ptr + token_before)
    same = (slot_before == slot) & (expert_before == expert)
    return first, slot, expert, (slot >= 0) & (expert < E) & ~same


@triton.jit
def _matrix(table_ptr, slot, which, like_ptr, ALIGN: tl.constexpr):
    """Return the address of a slot's A (`which` 0) or B (1), 0 if it has none, and the same as a pointer typed as
    `like_ptr`."""
    address = tl.load(table_ptr + slot * 2 + which, mask=slot >= 0, other=0)
    return address, tl.multiple_of(address.to(tl.pointer_type(like_ptr.dtype.element_ty)), ALIGN)


@triton.jit
def _rows(slots_ptr, tokens_ptr, experts_ptr, S, first, slot, expert, BLOCK_S: tl.constexpr):
    """Return the rows of the tile that begins at `first`, and which of them are of its expert and slot."""
    s = first + tl.arange(0, BLOCK_S)
    inside = (s < S) & (s < (first // BLOCK_S + 1) * BLOCK_S)
    token = tl.load(tokens_ptr + s, mask=inside, other=0)
    own = tl.load(experts_ptr + s, mask=inside, other=-1) == expert
    return s.to(tl.int64), inside & own & (tl.load(slots_ptr + token, mask=inside, other=-1) == slot)


@triton.jit(do_not_specialize=["S", "E"], do_not_specialize_on_alignment=_SCALARS)
def shrink(
    x_ptr,
    h_ptr,
    slots_ptr,
    tokens_ptr,
    experts_ptr,
    table_ptr,
    ranks_ptr,
    S,
    E,
    D,
    stride,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STEPS: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGN: tl.constexpr,
    PDL: tl.constexpr,
):
    """h (splits, S, R) in fp32. Grid (rows, splits, blocks of ranks): a split has `STEPS * BLOCK_D` inputs. x (S, D):
    rows `stride` apart; slots (tokens); tokens, experts (S), E for rows without terms; `table_ptr`: int64 (slots, 2),
    addresses of a site's A (E R, D) and B; 0: the adapter does not change it."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first, slot, expert, begins = _tile(slots_ptr, tokens_ptr, experts_ptr, E, BLOCK_S)
    address, a_ptr = _matrix(table_ptr, slot, 0, x_ptr, ALIGN)
    rank = tl.load(ranks_ptr + slot, mask=slot >= 0, other=0)
    if begins & (address != 0):
        width: tl.constexpr = BLOCK_D // PARTS
        split, r = tl.program_id(1), tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
        d = tl.arange(0, PARTS)[:, None, None] * width + tl.arange(0, width)[None, None, :] + split * STEPS * BLOCK_D
        a_at = a_ptr + (expert * rank + r)[None, :, None] * D + d
        s, keep = _rows(slots_ptr, tokens_ptr, experts_ptr, S, first, slot, expert, BLOCK_S)
        x_at, real = x_ptr + s[None, :, None] * stride + d, (r < rank)[None, :, None]
        total = tl.zeros([PARTS, BLOCK_R, BLOCK_S], dtype=tl.float32)
        for step in tl.range(0, STEPS, num_stages=STAGES):
            inside = d + step * BLOCK_D < D
            a = tl.load(a_at + step * BLOCK_D, mask=real & inside, other=0.0)
            x = tl.load(x_at + step * BLOCK_D, mask=keep[None, :, None] & inside, other=0.0)
            total = tl.dot(a, tl.permute(x, (0, 2, 1)), total, input_precision="ieee")
        tl.store(h_ptr + (split * S + s)[None, :] * R + r[:, None], tl.sum(total, 0), mask=keep[None, :])


@triton.jit(do_not_specialize=["S", "E"], do_not_specialize_on_alignment=_SCALARS)
def expand(
    h_ptr,
    y_ptr,
    slots_ptr,
    tokens_ptr,
    experts_ptr,
    table_ptr,
    ranks_ptr,
    scales_ptr,
    S,
    E,
    O,
    stride,
    R: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_O: tl.constexpr,
    ALIGN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Adds to y in place. Grid (rows, output blocks). y (S, O): rows `stride` apart; rows of B (E O, rank) are padded
    to a multiple of 8. The rest as in `shrink`."""
    first, slot, expert, begins = _tile(slots_ptr, tokens_ptr, experts_ptr, E, BLOCK_S)
    address, b_ptr = _matrix(table_ptr, slot, 1, y_ptr, ALIGN)
    rank = tl.load(ranks_ptr + slot, mask=slot >= 0, other=0)
    if begins & (address != 0):
        scale = tl.load(scales_ptr + slot)
        r, o = tl.arange(0, R), tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
        columns, inner = (rank + 7) // 8 * 8, (o < O)[:, None]
        b_at = b_ptr + (expert * O + o)[:, None] * columns + r[None, :]
        b = tl.load(b_at, mask=inner & (r < columns)[None, :], other=0.0)
        s, keep = _rows(slots_ptr, tokens_ptr, experts_ptr, S, first, slot, expert, BLOCK_S)
        if PDL:
            b = held(b)
            tl.extra.cuda.gdc_wait()
        y_at, inside = y_ptr + s[None, :] * stride + o[:, None], inner & keep[None, :]
        y = tl.load(y_at, mask=inside, other=0.0)
        h_at = h_ptr + s[:, None] * R + r[None, :]
        h = tl.load(h_at, mask=keep[:, None], other=0.0)
        for split in tl.static_range(1, SPLITS):
            h += tl.load(h_at + split * S * R, mask=keep[:, None], other=0.0)
        delta = tl.dot(b, tl.trans((h * scale).to(b.dtype)), input_precision="ieee")
        tl.store(y_at, (y.to(tl.float32) + delta).to(y.dtype), mask=inside)
    else:
        if PDL and waits(True):
            tl.extra.cuda.gdc_wait()
