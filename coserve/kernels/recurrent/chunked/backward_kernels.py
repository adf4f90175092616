"""Backward of recurrences over packed sequences, in chunks of Z tokens: see `kernels`, whose letters these use. `dx` is
the gradient of x.

Each decay enters through g, the sum within its chunk: where x = exp(g_i) y, dg_i gains x . dx, and the gradient of a
decay is the sum of dg from its token to the chunk's end.
"""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl

from coserve.kernels.recurrent.chunked.kernels import between, block, dot, head, put_rows, rows


@triton.jit
def _put_decay(ptr, dg, t, here, h, H):
    """Store the decays' gradient (T, H), given that of their sums."""
    tl.store(ptr + t.to(tl.int64) * H + h, tl.sum(dg, 0) - tl.cumsum(dg, 0) + dg, mask=here)


@triton.jit
def scan_back(
    dstates_ptr,
    dnew_ptr,
    dout_ptr,
    q_ptr,
    k_ptr,
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
    """Grid (sequences, heads, value blocks), last chunk first: the gradients of the states after each chunk (N, H, K,
    V), and dnew (T, H, V)."""
    b, h, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BV
    group = h // (H // G)
    dstate = tl.zeros((BK, BV), dtype=tl.float32)
    begin, end = tl.load(first_ptr + b), tl.load(first_ptr + b + 1)
    for step in range(end - begin):
        n = end - 1 - step
        at, there = block(n, h, H, K, V, first, BK, BV)
        tl.store(dstates_ptr + at, dstate.to(dstates_ptr.dtype.element_ty), mask=there)
        t = tl.load(chunks_ptr + 2 * n) + tl.arange(0, Z)
        here = t < tl.load(chunks_ptr + 2 * n + 1)
        decay = head(decay_ptr, t, here, h, H)
        g, last = tl.cumsum(decay, 0), tl.sum(decay, 0)
        q, k = rows(q_ptr, t, here, group, G, K, 0, BK), rows(k_ptr, t, here, group, G, K, 0, BK)
        dout = rows(dout_ptr, t, here, h, H, V, first, BV)
        weights = dot(q, tl.trans(k), k_ptr) * between(g, False, Z)
        dnew = dot(tl.trans(weights), dout, k_ptr)
        dnew += dot(k.to(tl.float32) * tl.exp(last - g)[:, None], dstate, k_ptr)
        put_rows(dnew_ptr, dnew, t, here, h, H, V, first, BV)
        dstate = dstate * tl.exp(last) + dot(tl.trans(q.to(tl.float32) * tl.exp(g)[:, None]), dout, k_ptr)
        if DELTA:
            dstate -= dot(tl.trans(rows(w_ptr, t, here, h, H, K, 0, BK)), dnew, k_ptr)


@triton.jit
def inputs_back(
    dq_ptr,
    dk_ptr,
    dw_ptr,
    ddecay_ptr,
    q_ptr,
    k_ptr,
    new_ptr,
    states_ptr,
    dout_ptr,
    dnew_ptr,
    dstates_ptr,
    decay_ptr,
    chunks_ptr,
    H,
    G,
    K,
    V,
    DELTA: tl.constexpr,
    Z: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Grid (chunks, heads): dq and dk by head (T, H, K), and the decays' gradient (T, H). With DELTA it also writes dw
    (T, H, K); dk and the decays' gradient then lack the terms through A, u and w, which `solve_back` adds, and the
    latter is the gradient of g."""
    n, h = tl.program_id(0), tl.program_id(1)
    i, group = tl.arange(0, Z), h // (H // G)
    start, end = tl.load(chunks_ptr + 2 * n), tl.load(chunks_ptr + 2 * n + 1)
    if start >= end:
        return
    t = start + i
    here = t < end
    dq, dk, dw = (
        tl.zeros((Z, BK), dtype=tl.float32),
        tl.zeros((Z, BK), dtype=tl.float32),
        tl.zeros((Z, BK), dtype=tl.float32),
    )
    dweights, kept = tl.zeros((Z, Z), dtype=tl.float32), 0.0
    for first in range(0, V, BV):
        at, there = block(n, h, H, K, V, first, BK, BV)
        state = tl.load(states_ptr + at, mask=there, other=0.0)
        dstate = tl.load(dstates_ptr + at, mask=there, other=0.0)
        dout = rows(dout_ptr, t, here, h, H, V, first, BV)
        new = rows(new_ptr, t, here, h, H, V, first, BV)
        dweights += dot(dout, tl.trans(new), k_ptr)
        dq += dot(dout, tl.trans(state), k_ptr)
        dk += dot(new, tl.trans(dstate), k_ptr)
        if DELTA:
            dw -= dot(rows(dnew_ptr, t, here, h, H, V, first, BV), tl.trans(state), k_ptr)
        kept += tl.sum(state.to(tl.float32) * dstate.to(tl.float32))
    decay = head(decay_ptr, t, here, h, H)
    g, last = tl.cumsum(decay, 0), tl.sum(decay, 0)
    q, k = rows(q_ptr, t, here, group, G, K, 0, BK), rows(k_ptr, t, here, group, G, K, 0, BK)
    dk *= tl.exp(last - g)[:, None]
    into_state = tl.sum(dk * k.to(tl.float32), 1)
    dweights *= between(g, False, Z)
    dq = dq * tl.exp(g)[:, None] + dot(dweights, k, k_ptr)
    within = dot(tl.trans(dweights), q, k_ptr)
    dg = tl.sum(q.to(tl.float32) * dq, 1) - tl.sum(k.to(tl.float32) * within, 1) - into_state
    dg += tl.where(t == end - 1, tl.sum(into_state, 0) + tl.exp(last) * kept, 0.0)
    put_rows(dq_ptr, dq, t, here, h, H, K, 0, BK)
    put_rows(dk_ptr, dk + within, t, here, h, H, K, 0, BK)
    if DELTA:
        put_rows(dw_ptr, dw, t, here, h, H, K, 0, BK)
        tl.store(ddecay_ptr + t.to(tl.int64) * H + h, dg, mask=here)
    else:
        _put_decay(ddecay_ptr, dg, t, here, h, H)


@triton.jit
def solve_back(
    dk_ptr,
    dv_ptr,
    ddecay_ptr,
    dbeta_ptr,
    part_dk_ptr,
    part_dg_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    inverse_ptr,
    dnew_ptr,
    dw_ptr,
    chunks_ptr,
    H,
    G,
    K,
    V,
    Z: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Grid (chunks, heads): dk by head (T, H, K), dv (T, H, V), and the gradients of the decays and of beta (T, H),
    given the parts of dk and dg that `inputs_back` computed."""
    n, h = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(chunks_ptr + 2 * n), tl.load(chunks_ptr + 2 * n + 1)
    if start >= end:
        return
    i = tl.arange(0, Z)
    t = start + i
    here = t < end
    g, beta = tl.cumsum(head(decay_ptr, t, here, h, H), 0), head(beta_ptr, t, here, h, H)
    k = rows(k_ptr, t, here, h // (H // G), G, K, 0, BK).to(tl.float32)
    at = ((n.to(tl.int64) * H + h) * Z + i[:, None]) * Z + i[None, :]
    inverse = tl.load(inverse_ptr + at)
    dw, decayed = rows(dw_ptr, t, here, h, H, K, 0, BK), beta * tl.exp(g)
    dinverse = dot(dw, tl.trans(k * decayed[:, None]), k_ptr)
    y = dot(tl.trans(inverse), dw, k_ptr)
    along = tl.sum(y * k, 1)
    dk, dbeta, dg = y * decayed[:, None], tl.exp(g) * along, decayed * along
    for first in range(0, V, BV):
        v = rows(v_ptr, t, here, h, H, V, first, BV).to(tl.float32)
        du = rows(dnew_ptr, t, here, h, H, V, first, BV)
        dinverse += dot(du, tl.trans(v * beta[:, None]), k_ptr)
        x = dot(tl.trans(inverse), du, k_ptr)
        dbeta += tl.sum(x * v, 1)
        put_rows(dv_ptr, x * beta[:, None], t, here, h, H, V, first, BV)
    da = -dot(tl.trans(inverse), dot(dinverse, tl.trans(inverse), k_ptr), k_ptr) * between(g, True, Z)
    through = da * dot(k, tl.trans(k), k_ptr)
    dbeta += tl.sum(through, 1)
    through *= beta[:, None]
    dg += tl.sum(through, 1) - tl.sum(through, 0) + head(part_dg_ptr, t, here, h, H)
    da *= beta[:, None]
    dk += dot(da, k, k_ptr) + dot(tl.trans(da), k, k_ptr) + rows(part_dk_ptr, t, here, h, H, K, 0, BK)
    put_rows(dk_ptr, dk, t, here, h, H, K, 0, BK)
    tl.store(dbeta_ptr + t.to(tl.int64) * H + h, dbeta, mask=here)
    _put_decay(ddecay_ptr, dg, t, here, h, H)
