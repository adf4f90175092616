"""Skinny GEMM: a few rows through a linear site. The time goes into reading the weight.

y[m, n] = bias[n] + scale[n] Σ_k x[m, k] W[n, k]        for up to 64 rows m, sums in fp32; scale: of FP8 weights, else 1

The weight is the left operand, so that its rows fill the tensor cores and x need not be padded to 64 rows. With FP8
weights, x of more than `fp8.FEW_ROWS` rows is rounded to FP8 first if the GPU has FP8 tensor cores: each program reads
all of x from the L2 cache, and in 16 bits x would be larger than the program's part of the weight. While another kernel
rounds x, this one prefetches its first weights into L2 (`Shape.ahead`).

A program may start before the preceding kernel has ended (programmatic dependent launch), which hides most of the
launch latency. The next kernel may start once every program has waited for the preceding one. By then x is complete,
but y is not.
"""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201 - a kernel's arguments have the types of its launch

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from coserve.kernels.gpu.device import device_info, interpreted
from coserve.kernels.gpu.launcher import launch
from coserve.kernels.gpu.rounding import cdiv
from coserve.kernels.gpu.timing import graph_ms
from coserve.kernels.lora.types import FrozenWeight
from coserve.kernels.quantized import fp8

ROWS = (16, 32, 64)
"""Row counts that kernels are compiled for; each serves every count up to its own."""


@dataclass(frozen=True)
class Shape:
    """Block sizes of outputs (n) and inputs (k), programs that share an output block (splits), warps, pipeline
    stages."""

    n: int
    k: int
    splits: int
    warps: int
    stages: int
    ahead: int = 0
    """Blocks of FP8 weights that a program fetches before the preceding kernel has ended: 0 or a power of 2."""


SHAPES = (
    Shape(64, 128, 1, 4, 6),
    Shape(64, 128, 2, 4, 6),
    Shape(128, 128, 1, 4, 4),
    Shape(32, 128, 1, 4, 6),
    Shape(32, 128, 2, 4, 6),
    Shape(32, 128, 4, 4, 6),
    Shape(16, 256, 1, 4, 4),
    Shape(16, 256, 2, 4, 4),
    Shape(16, 256, 4, 4, 4),
)
WIDE_SHAPES = (Shape(128, 128, 1, 8, 4),)
"""A further shape for 33 to 64 rows of 16 bits, where programs of 64 outputs would read as many bytes of x as of
weights."""
ROUNDED_SHAPES = (
    Shape(64, 128, 1, 4, 8, 4),
    Shape(64, 128, 2, 4, 8, 4),
    Shape(64, 256, 2, 4, 5, 2),
    Shape(128, 128, 1, 8, 4, 4),
    Shape(128, 256, 4, 8, 4, 2),
)
"""Shapes for x in FP8. Large blocks of outputs, since each reads all of x."""
PROGRAMS = (60, 600)
"""Fewest and most programs of the shapes to try: a GPU has over a hundred multiprocessors, and each start costs
time."""


@triton.jit
def fetch_lines(at):
    """Fetch lines of 128 bytes into the L2 cache; `at`: their addresses."""
    code: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(code, "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["M"])
def project(
    x_ptr,
    w_ptr,
    bias_ptr,
    scale_ptr,
    x_scale_ptr,
    y_ptr,
    parts_ptr,
    counters_ptr,
    M,
    N,
    K,
    x_stride,
    BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    X_SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (blocks of N, SPLITS). K is a multiple of SPLITS * BLOCK_K. The last program to finish an output block adds
    up its SPLITS parts, in order. AHEAD: blocks of FP8 weights to prefetch into L2; 0: none."""
    block, split = tl.program_id(0), tl.program_id(1)
    n, m = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    steps = K // (SPLITS * BLOCK_K)
    k = split * steps * BLOCK_K + tl.arange(0, BLOCK_K)
    w_at = w_ptr + n[:, None].to(tl.int64) * K + k[None, :]
    x_at = x_ptr + m[:, None] * x_stride + k[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if PDL:
        if AHEAD > 0:
            line = tl.minimum(tl.arange(0, AHEAD * BLOCK_K // 128) * 128, (steps - 1) * BLOCK_K)
            row = tl.minimum(n, N - 1).to(tl.int64) * K + split * steps * BLOCK_K
            fetch_lines(w_ptr + row[:, None] + line[None, :])
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for step in tl.range(0, steps, num_stages=STAGES):
        w = tl.load(w_at + step * BLOCK_K, mask=(n < N)[:, None], other=0.0)
        x = tl.load(x_at + step * BLOCK_K, mask=(m < M)[:, None], other=0.0)
        total = tl.dot(w.to(x.dtype), tl.trans(x), total)
    at, real = m[None, :] * N + n[:, None], (n < N)[:, None] & (m < M)[None, :]
    last = True
    if SPLITS > 1:
        tl.store(parts_ptr + split * (M * N) + at, total, mask=real)
        tl.debug_barrier()  # all threads have written before one counts the program
        last = tl.atomic_add(counters_ptr + block, 1, sem="acq_rel") == SPLITS - 1
        if last:
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for part in tl.static_range(SPLITS):
                total += tl.load(parts_ptr + part * (M * N) + at, mask=real, other=0.0, cache_modifier=".cg")
            tl.atomic_xchg(counters_ptr + block, 0, sem="relaxed")
    if last:
        if SCALE:
            total *= tl.load(scale_ptr + n, mask=n < N, other=0.0)[:, None]
        if X_SCALE:
            total *= tl.load(x_scale_ptr + m, mask=m < M, other=0.0)[None, :]
        if BIAS:
            total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=real)


def rows_of(rows: int) -> int | None:
    """Return the entry of `ROWS` that serves so many rows; None if there are too many."""
    return next((most for most in ROWS if most >= rows), None)


def shapes_of(inputs: int, outputs: int, dtype: torch.dtype, rows: int, *, rounded: bool = False) -> list[Shape]:
    """Return the shapes to try for up to `rows` rows, an entry of `ROWS`: those whose blocks divide D `inputs`, within
    `PROGRAMS` if any is. `rounded`: x is in FP8.

    Empty for fp32, which tensor cores would round.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return []
    shapes = ROUNDED_SHAPES if rounded else SHAPES + (WIDE_SHAPES if rows > 32 else ())
    fewest, most = PROGRAMS
    fair = [shape for shape in shapes if fewest <= cdiv(outputs, shape.n) * shape.splits <= most]
    return [shape for shape in fair or shapes if inputs % (shape.splits * shape.k) == 0]


def make_counters(outputs: int, device: torch.device) -> Tensor:
    """Allocate the counters of `skinny_gemm` for up to O `outputs`: int32 zeros, and zero again after each call. Use
    them on one stream only."""
    return torch.zeros(cdiv(outputs, min(shape.n for shape in SHAPES)), dtype=torch.int32, device=device)


def skinny_gemm(
    x_TD: Tensor,
    weight_OD: Tensor,
    bias_O: Tensor | None,
    counters: Tensor,
    shape: Shape,
    scale_O: Tensor | None = None,
    *,
    rounded: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return `scale x Wᵀ + bias`, (T, O) in x's dtype, for up to 64 rows. D is a multiple of `shape.splits * shape.k`;
    x's rows are dense. `scale_O`: fp32, of FP8 weights. `rounded`: round x to FP8, too.

    Also returns the workspace, which is still busy when the next kernel starts early: keep it until that kernel's
    memory is allocated.
    """
    (rows, inputs), outputs = x_TD.shape, weight_OD.shape[0]
    block, pdl = rows_of(rows), device_info(x_TD.device).early_launch
    assert block is not None, f"expected up to {ROWS[-1]} rows, got {rows}"
    assert x_TD.stride(1) == 1 and weight_OD.is_contiguous(), "expected dense rows"
    y = torch.empty(rows, outputs, dtype=x_TD.dtype, device=x_TD.device)
    x_scale_T, parts = None, y
    if rounded:
        x_TD, x_scale_T = fp8.quantize_activations(x_TD)
    if shape.splits > 1:
        parts = torch.empty(shape.splits, rows, outputs, dtype=torch.float32, device=x_TD.device)
    launch(
        project,
        (cdiv(outputs, shape.n), shape.splits),
        x_TD,
        weight_OD,
        y if bias_O is None else bias_O,
        y if scale_O is None else scale_O,
        y if x_scale_T is None else x_scale_T,
        y,
        parts,
        counters,
        rows,
        outputs,
        inputs,
        x_TD.stride(0),
        BIAS=bias_O is not None,
        SCALE=scale_O is not None,
        X_SCALE=x_scale_T is not None,
        BLOCK_M=block,
        BLOCK_N=shape.n,
        BLOCK_K=shape.k,
        SPLITS=shape.splits,
        STAGES=shape.stages,
        AHEAD=shape.ahead,
        PDL=pdl,
        num_warps=shape.warps,
        **({} if interpreted() else {"launch_pdl": pdl}),
    )
    return y, (parts,) if x_scale_T is None else (parts, x_TD, x_scale_T)


def run_each(weights: FrozenWeight, counters: Tensor, rows: int) -> None:
    """Run each kernel that `fastest` compares. Inside `compile_only` this compiles them all concurrently."""
    x_TD = torch.zeros(rows, weights.in_features, dtype=weights.dtype, device=weights.weight.device)
    rounded = _rounded(weights, x_TD)
    for shape in shapes_of(x_TD.shape[1], len(weights.weight), x_TD.dtype, rows, rounded=rounded):
        skinny_gemm(x_TD, weights.weight, None, counters, shape, weights.row_scales, rounded=rounded)


def fastest(weights: Sequence[FrozenWeight], counters: Tensor, rows: int) -> Shape | None:
    """Return the shape with which `skinny_gemm` is fastest at `rows` rows, or None if torch's own GEMM is at least as
    fast.

    Measured in a CUDA graph over all of `weights`, which together should exceed the L2 cache, with a small kernel
    before each GEMM as in a model.
    """
    x = torch.randn(rows, weights[0].in_features, dtype=weights[0].dtype, device=weights[0].weight.device)
    best, chosen = milliseconds(lambda x_TD, w: w.linear(x_TD), x, weights), None
    rounded = _rounded(weights[0], x)
    for shape in shapes_of(x.shape[1], len(weights[0].weight), x.dtype, rows, rounded=rounded):
        own = partial(skinny_gemm, bias_O=None, counters=counters, shape=shape, rounded=rounded)
        try:
            spent = milliseconds(lambda x_TD, w, own=own: own(x_TD, w.weight, scale_O=w.row_scales), x, weights)
        except triton.runtime.errors.OutOfResources:  # a shape too large for this device
            continue
        if spent < best:
            best, chosen = spent, shape
    return chosen


def _rounded(weights: FrozenWeight, x_TD: Tensor) -> bool:
    return weights.row_scales is not None and fp8.rounds(x_TD)


def milliseconds(
    product: Callable[[Tensor, FrozenWeight], object], x_TD: Tensor, weights: Sequence[FrozenWeight]
) -> float:
    """Return the milliseconds of one GEMM per weight; before each, a small kernel writes x."""
    made = torch.empty_like(x_TD)

    def run() -> None:
        for one in weights:
            torch.mul(x_TD, 0.5, out=made)
            product(made, one)

    run()
    return graph_ms(run)
