"""Kernels of the recurrent layers of a generation step: convolution, update of the convolution's state, recurrence.

Letters: see `kernels.recurrent.interface`. States lie in slots: conv (S + 2, W - 1, C), recurrent (S + 2, H, K, V). A
sequence b is the rows [starts[b], ends[b]); it begins with the state in slot from[b] and leaves its state in slot
to[b]. A token t has its sequence's first row in first[t], and its slot in source[t]. Rows from ends[last] on are
padding.
"""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator, assignment"
# ruff: noqa: ANN001, ANN201, ANN202 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def convolve(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    first_ptr,
    source_ptr,
    to_ptr,
    T,
    C,
    stride,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    KEEP: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """Grid (token blocks, channel blocks): out (T, C). KEEP: each sequence is one token (t), so its last inputs are
    also written into its slot, which no other program reads."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    here, in_c = t < T, c < C
    first = tl.load(first_ptr + t, mask=here, other=0)
    source = tl.load(source_ptr + t, mask=here, other=0).to(tl.int64)
    total = tl.zeros((BT, BC), dtype=tl.float32)
    taps = ()
    for tap in tl.static_range(W):
        row = t - (W - 1) + tap
        own = here & (row >= first)
        x = tl.load(
            x_ptr + row.to(tl.int64)[:, None] * stride + c[None, :], mask=own[:, None] & in_c[None, :], other=0.0
        )
        before = here & (row < first)
        at = source * (W - 1) + (row - first + (W - 1))
        kept = tl.load(state_ptr + at[:, None] * C + c[None, :], mask=before[:, None] & in_c[None, :], other=0.0)
        weight = tl.load(weight_ptr + c * W + tap, mask=in_c, other=0.0).to(tl.float32)
        read = x.to(tl.float32) + kept.to(tl.float32)
        total += read * weight[None, :]
        taps = taps + (read.to(state_ptr.dtype.element_ty),)  # noqa: RUF005 - the compiler knows no unpacking
    if KEEP:  # after all loads, so that no load waits for a store
        to = tl.load(to_ptr + t, mask=here, other=0).to(tl.int64)
        for tap in tl.static_range(1, W):
            at = to * (W - 1) + (tap - 1)
            tl.store(state_ptr + at[:, None] * C + c[None, :], taps[tap], mask=here[:, None] & in_c[None, :])
    if HAS_BIAS:
        total += tl.load(bias_ptr + c, mask=in_c, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(
        out_ptr + t.to(tl.int64)[:, None] * C + c[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=here[:, None] & in_c[None, :],
    )


@triton.jit
def keep_inputs(x_ptr, state_ptr, starts_ptr, ends_ptr, from_ptr, to_ptr, C, stride, W: tl.constexpr, BC: tl.constexpr):
    """Grid (sequences, channel blocks): write each sequence's last W - 1 inputs into its slot."""
    b, c = tl.program_id(0), tl.program_id(1) * BC + tl.arange(0, BC)
    start, end = tl.load(starts_ptr + b), tl.load(ends_ptr + b)
    if end <= start:
        return
    source, to = tl.load(from_ptr + b).to(tl.int64), tl.load(to_ptr + b).to(tl.int64)
    in_c = c < C
    # Oldest first: slot rows are shifted in place, and each is read before it is overwritten.
    for i in tl.static_range(W - 1):
        row = end - (W - 1) + i
        x = tl.load(x_ptr + row.to(tl.int64) * stride + c, mask=in_c & (row >= start), other=0.0)
        at = source * (W - 1) + (row - start + (W - 1))
        kept = tl.load(state_ptr + at * C + c, mask=in_c & (row < start), other=0.0)
        new = tl.where(row >= start, x.to(tl.float32), kept.to(tl.float32))
        tl.store(state_ptr + (to * (W - 1) + i) * C + c, new.to(state_ptr.dtype.element_ty), mask=in_c)


@triton.jit
def _add_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _read(
    row,
    h,
    k_at,
    q_ptr,
    k_ptr,
    decay_ptr,
    q_stride,
    k_stride,
    H,
    G,
    K: tl.constexpr,
    BY_KEY: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """A token's q and k (BK) for a head, their product, and the factor of its state."""
    in_k, group = k_at < K, h // (H // G)
    q = tl.load(q_ptr + row * q_stride + group * K + k_at, mask=in_k, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + row * k_stride + group * K + k_at, mask=in_k, other=0.0).to(tl.float32)
    if NORMALIZE:
        qq, kk, qk = tl.reduce((q * q, k * k, q * k), 0, _add_three)
        q, k = q / tl.sqrt(qq + 1e-6), k / tl.sqrt(kk + 1e-6)
        qk = qk / tl.sqrt(qq + 1e-6) / tl.sqrt(kk + 1e-6)
    else:
        qk = tl.sum(q * k, 0)
    if BY_KEY:
        decay = tl.load(decay_ptr + (row * H + h) * K + k_at, mask=in_k, other=0.0).to(tl.float32)
        factor = tl.exp(decay)[:, None]
    else:
        factor = tl.exp(tl.load(decay_ptr + row * H + h).to(tl.float32))
    return q, k, qk, factor


@triton.jit
def _step(
    state,
    q,
    k,
    qk,
    factor,
    row,
    h,
    v_at,
    out_ptr,
    v_ptr,
    beta_ptr,
    v_stride,
    H,
    scale,
    V: tl.constexpr,
    HAS_BETA: tl.constexpr,
):
    """Compute one token: store its output, and return the state after it (BK, BV)."""
    v = tl.load(v_ptr + row * v_stride + h * V + v_at, mask=v_at < V, other=0.0).to(tl.float32)
    state *= factor
    if HAS_BETA:
        out, known = tl.reduce((state * q[:, None], state * k[:, None]), 0, _add_two)
        v = (v - known) * tl.load(beta_ptr + row * H + h).to(tl.float32)
    else:
        out = tl.sum(state * q[:, None], 0)
    state += k[:, None] * v[None, :]
    out = (out + qk * v) * scale
    tl.store(out_ptr + (row * H + h) * V + v_at, out.to(out_ptr.dtype.element_ty), mask=v_at < V)
    return state


@triton.jit
def recur(
    out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    state_ptr,
    starts_ptr,
    ends_ptr,
    from_ptr,
    to_ptr,
    T,
    q_stride,
    k_stride,
    v_stride,
    H,
    G,
    K: tl.constexpr,
    V: tl.constexpr,
    scale,
    HAS_BETA: tl.constexpr,
    BY_KEY: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BY_VALUE: tl.constexpr,
    STREAM: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (sequences, heads, runs of BLOCKS value blocks), reversed with BY_VALUE: out (T, H, V), token by token; the
    state stays in registers. BLOCKS > 1 is for sequences of one token: the next blocks' states are loaded to shared
    memory meanwhile. Padding rows become zero; a program writes every `sequences`-th of them.

    q and k (T, G, K), v (T, H, V), each with its stride between tokens; decay (T, H) or, with BY_KEY, (T, H, K), beta
    (T, H). Both sums over keys are of the old state, so that they need not wait for each other: `q S_t = q exp(d_t)
    S_{t-1} + (q k) v`. STREAM: states are evicted from the L2 cache first. PDL: with one block, states are read before
    the preceding kernel has ended, so that kernel must not write states.
    """
    order: tl.constexpr = 2 if BY_VALUE else 0
    b, h, sequences = tl.program_id(order), tl.program_id(1), tl.num_programs(order)
    run, k_at = tl.program_id(2 - order) * BLOCKS, tl.arange(0, BK)
    start, end, last = tl.load(starts_ptr + b), tl.load(ends_ptr + b), tl.load(ends_ptr + sequences)
    source, to = tl.load(from_ptr + b).to(tl.int64), tl.load(to_ptr + b).to(tl.int64)
    policy: tl.constexpr = "evict_first" if STREAM else ""
    from_at, to_at = state_ptr + (source * H + h) * K * V, state_ptr + (to * H + h) * K * V
    if end > start:
        if BLOCKS > 1:
            if PDL:
                tl.extra.cuda.gdc_wait()
            row = tl.full((), 0, tl.int64) + start
            q, k, qk, factor = _read(
                row, h, k_at, q_ptr, k_ptr, decay_ptr, q_stride, k_stride, H, G, K, BY_KEY, NORMALIZE
            )
            for block in tl.range(0, BLOCKS, num_stages=STAGES):
                v_at = (run + block) * BV + tl.arange(0, BV)
                within, inside = k_at[:, None] * V + v_at[None, :], (k_at < K)[:, None] & (v_at < V)[None, :]
                state = tl.load(from_at + within, mask=inside, other=0.0, eviction_policy=policy)
                state = _step(
                    state, q, k, qk, factor, row, h, v_at, out_ptr, v_ptr, beta_ptr, v_stride, H, scale, V, HAS_BETA
                )
                tl.store(to_at + within, state, mask=inside, eviction_policy=policy)
        else:
            v_at = run * BV + tl.arange(0, BV)
            within, inside = k_at[:, None] * V + v_at[None, :], (k_at < K)[:, None] & (v_at < V)[None, :]
            state = tl.load(from_at + within, mask=inside, other=0.0, eviction_policy=policy)
            if PDL:
                tl.extra.cuda.gdc_wait()
            for t in range(start, end):
                row = tl.full((), 0, tl.int64) + t
                q, k, qk, factor = _read(
                    row, h, k_at, q_ptr, k_ptr, decay_ptr, q_stride, k_stride, H, G, K, BY_KEY, NORMALIZE
                )
                state = _step(
                    state, q, k, qk, factor, row, h, v_at, out_ptr, v_ptr, beta_ptr, v_stride, H, scale, V, HAS_BETA
                )
            tl.store(to_at + within, state, mask=inside, eviction_policy=policy)
    elif PDL:
        tl.extra.cuda.gdc_wait()
    at, nothing = run * BV + tl.arange(0, BV * BLOCKS), tl.zeros((BV * BLOCKS,), dtype=out_ptr.dtype.element_ty)
    for t in range(last + b, T, sequences):
        tl.store(out_ptr + (tl.full((), 0, tl.int64) + t) * H * V + h * V + at, nothing, mask=at < V)
