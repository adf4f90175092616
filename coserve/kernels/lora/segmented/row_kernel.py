"""One row through linear sites that share an input, with LoRA terms, in one launch.

y[n] = bias[n] + Σ_k W[n, k] x[k] + scaling Σ_r B_site[n, r] h_site[r],    h_site[r] = Σ_k A_site[r, k] x[k]

The first programs compute h, the others the outputs. Before the launch h must be `UNWRITTEN` everywhere, which is a
NaN: an entry is its own flag, so no counter or fence costs a further latency. A program of outputs reads h together
with x, and again only if its sum is not a number. Two buffers alternate: a launch clears that of the last one, which
has ended by then. The GPU starts programs in the order of their indices, and those of h wait for no others, so programs
that wait for h cannot keep them from running.

A program loads its weights before it waits for the preceding kernels (programmatic dependent launch). The next kernel
may start at once, so it must wait for this one before it reads anything.

x: (K); W: (N, K), the sites' rows one after another; h and last: (G, R) int32, the bits of fp32; tiles: (1, 4) int32;
the table as in `decode_kernel`, without block-diagonal pairs.
"""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl

from coserve.kernels.lora import shrinks
from coserve.kernels.lora.segmented.loads import rank_of, weights

UNWRITTEN = tl.constexpr(shrinks.UNWRITTEN)
NAN = tl.constexpr(0x7FC00000)
"""Written instead of `UNWRITTEN`, so that nobody waits for ever."""


@triton.jit(do_not_specialize=["row"], do_not_specialize_on_alignment=["ranks_ptr", "scalings_ptr"])
def linear_row(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    h_ptr,
    last_ptr,
    tiles_ptr,
    addresses_ptr,
    ranks_ptr,
    scalings_ptr,
    K,
    N,
    N1,
    N2,
    row,
    R,
    SITES: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    ENTRIES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (SITES * RANK_BLOCKS, then blocks of N). N1, N2: first output of the second and of the third site, multiples
    of BLOCK_N. ENTRIES: of a buffer, a power of 2."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    rows = tl.load(tiles_ptr + 1)
    slot = tl.load(tiles_ptr + 2)
    k = tl.arange(0, BLOCK_K)
    if program < SITES * RANK_BLOCKS:
        site = program // RANK_BLOCKS
        entry = slot * row + site
        r = program % RANK_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
        real = r < rank_of(tl.load(ranks_ptr + entry, mask=rows > 0, other=0))
        a_ptr = weights(addresses_ptr, tl.maximum(entry, 0), 0, x_ptr)
        a = tl.load(a_ptr + r[:, None] * K + k[None, :], mask=real[:, None] & (k < K)[None, :], other=0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
        x = tl.load(x_ptr + k, mask=k < K, other=0.0)
        shrunk = tl.sum(a.to(tl.float32) * x.to(tl.float32)[None, :], 1).to(tl.int32, bitcast=True)
        tl.store(h_ptr + site * R + r, tl.where(shrunk == UNWRITTEN, NAN, shrunk), mask=real)
        if program == 0:
            tl.store(last_ptr + tl.arange(0, ENTRIES), tl.full([ENTRIES], UNWRITTEN, tl.int32))
        return
    first = (program - SITES * RANK_BLOCKS) * BLOCK_N
    own = 0
    begin = 0
    if SITES > 1 and first >= N1:
        own = 1
        begin = N1
        if SITES > 2 and first >= N2:
            own = 2
            begin = N2
    place = slot * row + own
    n = first + tl.arange(0, BLOCK_N)
    w_at = w_ptr + n[:, None].to(tl.int64) * K + k[None, :]
    w = tl.load(w_at, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
    rank = rank_of(tl.load(ranks_ptr + place, mask=rows > 0, other=0))
    scaling = tl.load(scalings_ptr + tl.maximum(place, 0))
    b_ptr = weights(addresses_ptr, tl.maximum(place, 0), 1, x_ptr)
    j = tl.arange(0, BLOCK_R)
    stride = (rank + 7) // 8 * 8
    b_at = b_ptr + (n - begin)[:, None] * stride + j[None, :]
    b = tl.load(b_at, mask=(n < N)[:, None] & (j < stride)[None, :], other=0.0).to(tl.float32)
    h_at = h_ptr + own * R + j
    if PDL:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x_ptr + k, mask=k < K, other=0.0)
    bits = tl.load(h_at, mask=j < rank, other=0, volatile=True)
    y = tl.sum(w.to(tl.float32) * v.to(tl.float32)[None, :], 1)
    term = tl.sum(b * bits.to(tl.float32, bitcast=True)[None, :], 1)
    if tl.max((term != term).to(tl.int32), 0) > 0:  # noqa: PLR0124
        while tl.max((bits == UNWRITTEN).to(tl.int32), 0) > 0:
            bits = tl.load(h_at, mask=j < rank, other=0, volatile=True)
        term = tl.sum(b * bits.to(tl.float32, bitcast=True)[None, :], 1)
    if BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + n, (y + scaling * term).to(y_ptr.dtype.element_ty), mask=n < N)
