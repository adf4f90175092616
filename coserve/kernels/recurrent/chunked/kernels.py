"""Forward of recurrences over packed sequences, in chunks of Z tokens.

Letters: see `kernels.recurrent.interface`; N chunks, B sequences. Chunk n is the rows [chunks[n, 0], chunks[n, 1]);
sequence b is the chunks [first[b], first[b + 1]). With g the decay summed within the chunk, D_ij = exp(g_i - g_j) for
i >= j, and S the state before the chunk, in the notation of Gated DeltaNet (Yang et al., ICLR '25, section 3.3):

    inverse = (I + A)^-1, A_ij = beta_i (k_i . k_j) D_ij for i > j          (Z, Z)
    u = inverse (beta v), w = inverse (beta exp(g) k)                       (Z, V), (Z, K)
    new = u - w S; without a delta rule new = v                             (Z, V)
    out = exp(g) q S + ((q k^T) D) new                                      (Z, V)
    S of the next chunk = exp(g_last) S + (exp(g_last - g) k)^T new         (K, V)

Queries and keys come normalised and scaled. Products round their inputs to the keys' dtype.
"""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a, b, like_ptr):
    """a @ b in fp32, both rounded to the dtype of what `like_ptr` points to."""
    own = like_ptr.dtype.element_ty
    return tl.dot(a.to(own), b.to(own), input_precision="ieee")


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
    Z: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Grid (chunks, heads): inverse (N, H, Z, Z), u (T, H, V), w (T, H, K)."""
    n, h = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, Z)
    t = tl.load(chunks_ptr + 2 * n) + i
    here = t < tl.load(chunks_ptr + 2 * n + 1)
    g, beta = tl.cumsum(head(decay_ptr, t, here, h, H), 0), head(beta_ptr, t, here, h, H)
    k = rows(k_ptr, t, here, h // (H // G), G, K, 0, BK)
    x = -dot(k, tl.trans(k), k_ptr) * beta[:, None] * between(g, True, Z)
    for row in range(1, Z):  # forward substitution: rows above already hold the inverse, less its diagonal
        own = tl.sum(tl.where(i[:, None] == row, x, 0.0), 0)
        x = tl.where(i[:, None] == row, (own + tl.sum(own[:, None] * x, 0))[None, :], x)
    x += tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    at = ((n.to(tl.int64) * H + h) * Z + i[:, None]) * Z + i[None, :]
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
    chunks_ptr,
    first_ptr,
    H,
    G,
    K,
    V,
    DELTA: tl.constexpr,
    Z: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Grid (sequences, heads, value blocks): the states before each chunk (N, H, K, V), and new (T, H, V), which is
    not written without DELTA."""
    b, h, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BV
    state = tl.zeros((BK, BV), dtype=tl.float32)
    begin, end = tl.load(first_ptr + b), tl.load(first_ptr + b + 1)
    for step in range(end - begin):
        n = begin + step
        at, there = block(n, h, H, K, V, first, BK, BV)
        tl.store(states_ptr + at, state.to(states_ptr.dtype.element_ty), mask=there)
        t = tl.load(chunks_ptr + 2 * n) + tl.arange(0, Z)
        here = t < tl.load(chunks_ptr + 2 * n + 1)
        decay = head(decay_ptr, t, here, h, H)
        g, last = tl.cumsum(decay, 0), tl.sum(decay, 0)
        new = rows(u_ptr, t, here, h, H, V, first, BV).to(tl.float32)
        if DELTA:
            new -= dot(rows(w_ptr, t, here, h, H, K, 0, BK), state, k_ptr)
            put_rows(new_ptr, new, t, here, h, H, V, first, BV)
        k = rows(k_ptr, t, here, h // (H // G), G, K, 0, BK).to(tl.float32) * tl.exp(last - g)[:, None]
        state = state * tl.exp(last) + dot(tl.trans(k), new, k_ptr)


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
    t = tl.load(chunks_ptr + 2 * n) + tl.arange(0, Z)
    here = t < tl.load(chunks_ptr + 2 * n + 1)
    g = tl.cumsum(head(decay_ptr, t, here, h, H), 0)
    q = rows(q_ptr, t, here, h // (H // G), G, K, 0, BK)
    k = rows(k_ptr, t, here, h // (H // G), G, K, 0, BK)
    at, there = block(n, h, H, K, V, first, BK, BV)
    state = tl.load(states_ptr + at, mask=there, other=0.0)
    weights = dot(q, tl.trans(k), k_ptr) * between(g, False, Z)
    new = rows(new_ptr, t, here, h, H, V, first, BV)
    out = dot(q, state, k_ptr) * tl.exp(g)[:, None] + dot(weights, new, k_ptr)
    put_rows(out_ptr, out, t, here, h, H, V, first, BV)
