"""Forward of recurrences over packed sequences, in chunks of Z tokens.

Letters: see `kernels.recurrent.interface`; N chunks, B sequences. Chunk n is the rows [chunks[n, 0], chunks[n, 1]);
sequence b is the chunks [first[b], first[b + 1]). With g the decay summed within the chunk, D_ij = exp(g_i - g_j) for
i >= j, and S the state before the chunk, in the notation of Gated DeltaNet (Yang et al., ICLR '25, section 3.3):

    inverse = (I + A)^-1, A_ij = beta_i (k_i . k_j) D_ij for i > j          (Z, Z)
    u = inverse (beta v), w = inverse (beta exp(g) k)                       (Z, V), (Z, K)
    new = u - w S; without a delta rule new = v                             (Z, V)
    out = exp(g) q S + ((q k^T) D) new                                      (Z, V)
    S of the next chunk = exp(g_last) S + (exp(g_last - g) k)^T new         (K, V)

Queries and keys come normalised and scaled (`prepare`). Products round their inputs to the keys' dtype. Empty chunks
and sequences are padding.
"""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a, b, like_ptr):
    """a @ b in fp32, both rounded to the dtype of what `like_ptr` points to."""
    own = like_ptr.dtype.element_ty
    return tl.dot(a.to(own), b.to(own), input_precision="ieee")


@triton.jit
def precise(a, b, EXACT: tl.constexpr):
    """a @ b of fp32 matrices, on tensor cores: in TF32, 11 bits where bfloat16 has 8; EXACT: in fp32, by three products
    in TF32."""
    return tl.dot(a, b, input_precision="tf32x3" if EXACT else "tf32")


@triton.jit
def rows(ptr, t, here, h, heads, size, first, BLOCK: tl.constexpr):
    """Load [first, first + BLOCK) of head h of the rows t of a tensor (T, heads, size); zeros where there is none."""
    c = first + tl.arange(0, BLOCK)
    at = (t.to(tl.int64)[:, None] * heads + h) * size + c[None, :]
    return tl.load(ptr + at, mask=here[:, None] & (c < size)[None, :], other=0.0)


@triton.jit
def put_rows(ptr, x, t, here, h, heads, size, first, BLOCK: tl.constexpr):
    """Store what `rows` loads."""
    c = first + tl.arange(0, BLOCK)
    at = (t.to(tl.int64)[:, None] * heads + h) * size + c[None, :]
    tl.store(ptr + at, x.to(ptr.dtype.element_ty), mask=here[:, None] & (c < size)[None, :])


@triton.jit
def head(ptr, t, here, h, heads):
    """Load head h of the rows t of a tensor (T, heads), in fp32."""
    return tl.load(ptr + t.to(tl.int64) * heads + h, mask=here, other=0.0).to(tl.float32)


@triton.jit
def block(n, h, heads, K, V, first, BK: tl.constexpr, BV: tl.constexpr):
    """Offsets and mask of [first, first + BV) of the values of head h in chunk n of a tensor (N, heads, K, V)."""
    k, v = tl.arange(0, BK), first + tl.arange(0, BV)
    at = ((n.to(tl.int64) * heads + h) * K + k[:, None]) * V + v[None, :]
    return at, (k < K)[:, None] & (v < V)[None, :]


@triton.jit
def between(g, strict: tl.constexpr, Z: tl.constexpr):
    """D (Z, Z): exp(g_i - g_j) for i >= j, or i > j; else 0."""
    i = tl.arange(0, Z)
    seen = i[:, None] > i[None, :] if strict else i[:, None] >= i[None, :]
    return tl.exp(tl.where(seen, g[:, None] - g[None, :], float("-inf")))


@triton.jit
def prepare(
    q_ptr,
    k_ptr,
    from_q_ptr,
    from_k_ptr,
    T,
    q_stride,
    k_stride,
    scale,
    G,
    K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """Grid (token blocks, G): q and k (T, G, K), normalised and scaled, from tensors with strides between tokens."""
    t, group, c = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1), tl.arange(0, BK)
    here, t = (t < T)[:, None] & (c < K)[None, :], t.to(tl.int64)[:, None]
    q = tl.load(from_q_ptr + t * q_stride + group * K + c[None, :], mask=here, other=0.0).to(tl.float32)
    k = tl.load(from_k_ptr + t * k_stride + group * K + c[None, :], mask=here, other=0.0).to(tl.float32)
    if NORMALIZE:
        q *= tl.rsqrt(tl.sum(q * q, 1) + 1e-6)[:, None]
        k *= tl.rsqrt(tl.sum(k * k, 1) + 1e-6)[:, None]
    at = (t * G + group) * K + c[None, :]
    tl.store(q_ptr + at, (q * scale).to(q_ptr.dtype.element_ty), mask=here)
    tl.store(k_ptr + at, k.to(k_ptr.dtype.element_ty), mask=here)


@triton.jit
def _whole_diagonal(left, PART: tl.constexpr, Z: tl.constexpr):
    """The inverses of 1 - `left`'s diagonal blocks of PART rows, less their diagonals: (Z, Z), by forward substitution.
    Rows above already hold the inverse."""
    i = tl.arange(0, Z)
    own_part = (i // PART)[:, None] == (i // PART)[None, :]
    x = tl.where(own_part, left, 0.0)
    for row in range(1, PART):
        own = tl.sum(tl.where(i[:, None] % PART == row, x, 0.0), 0)
        new = (own + tl.sum(own[:, None] * x, 0))[None, :]
        x = tl.where(own_part & (i[:, None] % PART == row), new, x)
    return x


@triton.jit
def _compact_diagonal(left, PART: tl.constexpr, Z: tl.constexpr):
    """`_whole_diagonal`, by a loop over (Z / PART, PART, PART) instead of (Z, Z)."""
    BLOCKS: tl.constexpr = Z // PART
    b, r = tl.arange(0, BLOCKS), tl.arange(0, PART)
    own_part = b[:, None, None, None] == b[None, None, :, None]
    x = tl.sum(tl.where(own_part, tl.reshape(left, (BLOCKS, PART, BLOCKS, PART)), 0.0), 2)
    for row in range(1, PART):
        here = r[None, :, None] == row
        own = tl.sum(tl.where(here, x, 0.0), 1)
        new = own + tl.sum(own[:, :, None] * x, 1)
        x = tl.where(here, new[:, None, :], x)
    return tl.reshape(tl.where(own_part, x[:, :, None, :], 0.0), (Z, Z))


@triton.jit
def solve(
    inverse_ptr,
    u_ptr,
    w_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    chunks_ptr,
    H,
    G,
    K,
    V,
    PART: tl.constexpr,
    COMPACT: tl.constexpr,
    EXACT: tl.constexpr,
    GIVEN: tl.constexpr,
    Z: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Grid (chunks, heads): inverse (N, H, Z, Z), u (T, H, V), w (T, H, K). The inverses of diagonal blocks of PART
    rows are found row by row, all at once; products double the blocks until there is one. COMPACT: the rows' loop holds
    the diagonal blocks alone. EXACT: see `precise`. GIVEN: the inverse is read, not computed."""
    n, h = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(chunks_ptr + 2 * n), tl.load(chunks_ptr + 2 * n + 1)
    if start >= end:
        return
    i = tl.arange(0, Z)
    t = start + i
    here = t < end
    g, beta = tl.cumsum(head(decay_ptr, t, here, h, H), 0), head(beta_ptr, t, here, h, H)
    k = rows(k_ptr, t, here, h // (H // G), G, K, 0, BK)
    at = ((n.to(tl.int64) * H + h) * Z + i[:, None]) * Z + i[None, :]
    if GIVEN:
        x = tl.load(inverse_ptr + at)
    else:
        left = -dot(k, tl.trans(k), k_ptr) * beta[:, None] * between(g, True, Z)
        x = _compact_diagonal(left, PART, Z) if COMPACT else _whole_diagonal(left, PART, Z)
        x += tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        for double in tl.static_range(6):
            if (PART << double) < Z:  # of two neighbouring blocks, the inverse below the first
                part = i // (PART << double)
                below = (part[:, None] == part[None, :] + 1) & (part[None, :] % 2 == 0)
                x += precise(x, precise(tl.where(below, left, 0.0), x, EXACT), EXACT)
        tl.store(inverse_ptr + at, x.to(inverse_ptr.dtype.element_ty))
    w = dot(x, k.to(tl.float32) * (beta * tl.exp(g))[:, None], k_ptr)
    put_rows(w_ptr, w, t, here, h, H, K, 0, BK)
    for first in range(0, V, BV):
        v = rows(v_ptr, t, here, h, H, V, first, BV).to(tl.float32)
        put_rows(u_ptr, dot(x, v * beta[:, None], k_ptr), t, here, h, H, V, first, BV)


@triton.jit
def scan(
    states_ptr,
    new_ptr,
    k_ptr,
    u_ptr,
    w_ptr,
    decay_ptr,
    slots_ptr,
    from_ptr,
    to_ptr,
    chunks_ptr,
    first_ptr,
    H,
    G,
    K,
    V,
    DELTA: tl.constexpr,
    SLOTS: tl.constexpr,
    Z: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Grid (sequences, heads, value blocks): the states before each chunk (N, H, K, V), and new (T, H, V), which is
    not written without DELTA. States begin at zero or, with SLOTS, in slot from[b] of (slots, H, K, V), fp32, and end
    in slot to[b]."""
    b, h, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BV
    begin, end = tl.load(first_ptr + b), tl.load(first_ptr + b + 1)
    start = tl.load(chunks_ptr + 2 * begin, mask=end > begin, other=0)
    stop = tl.load(chunks_ptr + 2 * end - 1, mask=end > begin, other=0)
    if SLOTS:
        at, there = block(tl.load(from_ptr + b), h, H, K, V, first, BK, BV)
        state = tl.load(slots_ptr + at, mask=there & (end > begin), other=0.0)
    else:
        state = tl.zeros((BK, BV), dtype=tl.float32)
    for step in range(end - begin):
        at, there = block(begin + step, h, H, K, V, first, BK, BV)
        tl.store(states_ptr + at, state.to(states_ptr.dtype.element_ty), mask=there)
        t = start + step * Z + tl.arange(0, Z)
        here = t < stop
        decay = head(decay_ptr, t, here, h, H)
        g, last = tl.cumsum(decay, 0), tl.sum(decay, 0)
        new = rows(u_ptr, t, here, h, H, V, first, BV).to(tl.float32)
        if DELTA:
            new -= dot(rows(w_ptr, t, here, h, H, K, 0, BK), state, k_ptr)
            put_rows(new_ptr, new, t, here, h, H, V, first, BV)
        k = rows(k_ptr, t, here, h // (H // G), G, K, 0, BK).to(tl.float32) * tl.exp(last - g)[:, None]
        state = state * tl.exp(last) + dot(tl.trans(k), new, k_ptr)
    if SLOTS:
        at, there = block(tl.load(to_ptr + b), h, H, K, V, first, BK, BV)
        tl.store(slots_ptr + at, state, mask=there & (end > begin))


@triton.jit
def output(
    out_ptr,
    q_ptr,
    k_ptr,
    new_ptr,
    states_ptr,
    decay_ptr,
    chunks_ptr,
    H,
    G,
    K,
    V,
    Z: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Grid (chunks, heads, value blocks): out (T, H, V)."""
    n, h, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BV
    start, end = tl.load(chunks_ptr + 2 * n), tl.load(chunks_ptr + 2 * n + 1)
    if start >= end:
        return
    t = start + tl.arange(0, Z)
    here = t < end
    g = tl.cumsum(head(decay_ptr, t, here, h, H), 0)
    q = rows(q_ptr, t, here, h // (H // G), G, K, 0, BK)
    k = rows(k_ptr, t, here, h // (H // G), G, K, 0, BK)
    at, there = block(n, h, H, K, V, first, BK, BV)
    state = tl.load(states_ptr + at, mask=there, other=0.0)
    weights = dot(q, tl.trans(k), k_ptr) * between(g, False, Z)
    new = rows(new_ptr, t, here, h, H, V, first, BV)
    out = dot(q, state, k_ptr) * tl.exp(g)[:, None] + dot(weights, new, k_ptr)
    put_rows(out_ptr, out, t, here, h, H, V, first, BV)
