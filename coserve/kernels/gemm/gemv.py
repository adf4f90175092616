"""GEMV: one row through linear sites that share an input. The time goes into reading the stacked weight.

project  y[n] = bias[n] + scale[n] Σ_k W[n, k] x[k]        scale: of FP8 weights, else 1

A program issues the loads of all its weights before it waits for the preceding kernels (programmatic dependent launch).
The next kernel may start at once, so it must wait for this one before it reads anything.
"""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201 - a kernel's arguments have the types of its launch

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from coserve.kernels.gpu.device import device_info, interpreted
from coserve.kernels.gpu.launcher import launch
from coserve.kernels.gpu.rounding import cdiv, next_power_of_2
from coserve.kernels.gpu.timing import graph_ms
from coserve.kernels.lora.types import FrozenWeight

MAX_INPUTS = 32768
"""Most inputs D, since a program reads them all at once."""
Shape = tuple[int, int]
SHAPES: tuple[Shape, ...] = ((1, 4), (1, 8), (2, 4), (2, 8), (4, 4), (4, 8), (8, 8))
"""(Rows of the weight per program, warps)."""


@triton.jit
def project(
    x_ptr,
    w_ptr,
    bias_ptr,
    scale_ptr,
    y_ptr,
    K,
    N,
    BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (blocks of N)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    w = tl.load(w_ptr + n[:, None].to(tl.int64) * K + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + k, mask=k < K, other=0.0)
    y = tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], 1)
    if SCALE:
        y *= tl.load(scale_ptr + n, mask=n < N, other=0.0)
    if BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


def shapes_of(inputs: int) -> list[Shape]:
    """Return the `SHAPES` with which weights take 32 to 128 registers per thread."""
    if inputs > MAX_INPUTS:
        return []
    wide = next_power_of_2(inputs)
    return [(block, warps) for block, warps in SHAPES if 32 <= block * wide // (64 * warps) <= 128]


def run_each(weights: FrozenWeight) -> None:
    """Run each kernel that `fastest` compares. Inside `compile_only` this compiles them all concurrently."""
    x_D = torch.zeros(weights.in_features, dtype=weights.dtype, device=weights.weight.device)
    for shape in shapes_of(len(x_D)):
        gemv(x_D, weights.weight, None, shape, weights.row_scales)


def fastest(weights: Sequence[FrozenWeight]) -> Shape | None:
    """Return the shape with which `gemv` is fastest, or None if torch's own GEMM is at least as fast.

    Measured in a CUDA graph over all of `weights`, which together should exceed the L2 cache.
    """
    x = torch.randn(1, weights[0].in_features, dtype=weights[0].dtype, device=weights[0].weight.device)
    best, chosen = _milliseconds(lambda w: w.linear(x), weights), None
    for shape in shapes_of(x.shape[1]):
        own = partial(gemv, x[0], bias_O=None, shape=shape)
        try:
            spent = _milliseconds(lambda w, own=own: own(weight_OD=w.weight, scale_O=w.row_scales), weights)
        except triton.runtime.errors.OutOfResources:  # a shape too large for this device
            continue
        if spent < best:
            best, chosen = spent, shape
    return chosen


def _milliseconds(call: Callable[[FrozenWeight], Tensor], weights: Sequence[FrozenWeight]) -> float:
    def run() -> None:
        for one in weights:
            call(one)

    for one in weights[:2]:
        call(one)
    return graph_ms(run)


def gemv(x_D: Tensor, weight_OD: Tensor, bias_O: Tensor | None, shape: Shape, scale_O: Tensor | None = None) -> Tensor:
    """Return `scale weight x + bias` (O). `shape`: one of `shapes_of`. `scale_O`: fp32, of FP8 weights."""
    (O, D), (block, warps) = weight_OD.shape, shape
    pdl = device_info(x_D.device).early_launch
    options = {"PDL": pdl} if interpreted() else {"PDL": pdl, "launch_pdl": pdl}
    y = torch.empty(O, dtype=x_D.dtype, device=x_D.device)
    launch(
        project,
        (cdiv(O, block),),
        x_D,
        weight_OD,
        y if bias_O is None else bias_O,
        y if scale_O is None else scale_O,
        y,
        D,
        O,
        BIAS=bias_O is not None,
        SCALE=scale_O is not None,
        BLOCK_N=block,
        BLOCK_K=next_power_of_2(D),
        num_warps=warps,
        num_stages=1,
        **options,
    )
    return y
