"""GEMV: one row through linear sites that share an input, with its adapter. Reading the stacked weight is all the work.

    shrink   h[split, site, r] = Σ_{k in split} A_site[r, k] x[k]        (`decode_kernel.shrink`)
    project  y[n] = bias[n] + Σ_k W[n, k] x[k] + scaling Σ_r B_site[n, r] (Σ_split h[split, site, r])

A program of `project` issues the loads of all its weights before it waits for the preceding kernels (programmatic dependent
launch). The shrink runs meanwhile, and the expand is a few multiplications at the end.
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
from coserve.kernels.lora.segmented.adapter_table import RANK_BLOCK
from coserve.kernels.lora.segmented.block_sizes import DecodeBlocks
from coserve.kernels.lora.segmented.launch_decode import decode_shrink
from coserve.kernels.lora.segmented.loads import b_blocks, b_rows, h_columns, rank_of, weights, within
from coserve.kernels.lora.segmented.plan import DecodeTables

MAX_INPUTS = 32768
"""Most inputs D: a program reads them all at once."""
Shape = tuple[int, int]
SHAPES: tuple[Shape, ...] = ((1, 4), (1, 8), (2, 4), (2, 8), (4, 4), (4, 8), (8, 8))
"""Rows of the weight that a program reads, and its warps."""
ADAPTER_SHAPES: dict[int, tuple[tuple[int, Shape], ...]] = {
    2048: ((256, (8, 4)),),
    4096: ((64, (2, 4)), (128, (4, 8)), (256, (8, 4))),
    8192: ((64, (2, 4)), (256, (4, 4))),
    16384: ((64, (2, 4)), (256, (1, 4))),
}
"""Those for a row with an adapter, by inputs, rounded up to a power of two: (largest rank, shape). Measured: `gemv_shapes.json`."""
ONE_WAVE, WAVE_SHAPE, WAVE_INPUTS = 3, (8, 4), 4096
"""The shape for adapters where so many programs a multiprocessor are all there are of it; of `WAVE_INPUTS`, rounded up, too."""


@triton.jit(do_not_specialize=["row"], do_not_specialize_on_alignment=["ranks_ptr", "scalings_ptr"])
def project(
    x_ptr, w_ptr, bias_ptr, y_ptr, h_ptr, tiles_ptr, addresses_ptr, ranks_ptr, scalings_ptr,
    K, N, first, second, row, R,
    LORA: tl.constexpr, BIAS: tl.constexpr, SITES: tl.constexpr, SPLITS: tl.constexpr, SPLITS_POW2: tl.constexpr,
    SHARDS: tl.constexpr, SLICE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of N). Sites end at `first`, `second` and N, at ends of blocks. `SHARDS`, `R`: see `decode_kernel`.

    `SLICE`: one site, whose terms are those of the outputs from `first` to `second`.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    start = tl.program_id(0) * BLOCK_N
    n = start + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    w = tl.load(w_ptr + n[:, None].to(tl.int64) * K + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
    if LORA:
        site = (start >= first).to(tl.int32) + (start >= second).to(tl.int32)
        begin = tl.where(start >= second, second, tl.where(start >= first, first, 0))
        rows = tl.load(tiles_ptr + 1)
        if SLICE:
            rows = tl.where(site == 1, rows, 0)
            site = 0
        entry = tl.load(tiles_ptr + 2) * row + site
        shape = tl.where(rows > 0, tl.load(ranks_ptr + entry), 0)
        rank = rank_of(shape)
        scaling = tl.load(scalings_ptr + entry)
        b_ptr = weights(addresses_ptr, entry, 1, w_ptr)
        r = tl.arange(0, BLOCK_R)
        length = (rank + 7) // 8 * 8
        own = tl.zeros([BLOCK_N], dtype=tl.int32)
        if b_blocks(shape) > 1:  # a row has the ranks of its block
            O = tl.where(start >= second, N, tl.where(start >= first, second, first)) - begin
            length, own, _, _ = b_rows(shape, n - begin, start - begin, BLOCK_N, O)
        b_mask = (n < N)[:, None] & (r < rank)[None, :] & within(r[None, :], own[:, None], length, True)
        b = tl.load(b_ptr + ((n - begin) * length - own)[:, None] + r[None, :], mask=b_mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + k, mask=k < K, other=0.0)
    y = tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], 1)
    if BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    if LORA:
        split = tl.arange(0, SPLITS_POW2)
        h_mask = (split < SPLITS)[:, None] & (r < rank)[None, :]
        h_at = h_ptr + (split[:, None] * SITES + site) * R + h_columns(r, rank, SPLITS * SITES * R, SHARDS)[None, :]
        h = tl.sum(tl.load(h_at, mask=h_mask, other=0.0), 0)
        y += scaling * tl.sum(b.to(tl.float32) * h[None, :], 1)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


def shapes_of(inputs: int, sizes: Sequence[int]) -> list[Shape]:
    """Those of `SHAPES` whose blocks end where sites end, and keep 32 to 128 registers of a thread busy."""
    if inputs > MAX_INPUTS or len(sizes) > 3:
        return []
    wide = next_power_of_2(inputs)
    return [
        (block, warps)
        for block, warps in SHAPES
        if all(size % block == 0 for size in sizes) and 32 <= block * wide // (64 * warps) <= 128
    ]


def adapter_shape(inputs: int, sizes: Sequence[int], R: int, multiprocessors: int, base: Shape) -> Shape:
    """The shape of a row with an adapter of rank up to R; `base`: the fastest one without.

    A program that waits for the shrink keeps its weights in registers meanwhile, so shapes that are alike for the base alone
    differ by up to 80% with an adapter. `base` where nothing was measured for so many inputs, or where blocks would not end where
    sites end.
    """
    wide = next_power_of_2(inputs)
    found = next((shape for most, shape in ADAPTER_SHAPES.get(wide, ()) if most >= R), base)
    if wide == WAVE_INPUTS and cdiv(sum(sizes), WAVE_SHAPE[0]) <= ONE_WAVE * multiprocessors:
        found = WAVE_SHAPE
    return found if all(size % found[0] == 0 for size in sizes) else base


def run_each(weight_OD: Tensor, sizes: Sequence[int]) -> None:
    """Run each kernel that `fastest` compares, so that within `compile_only` all are compiled at the same time."""
    x_D = torch.zeros(weight_OD.shape[1], dtype=weight_OD.dtype, device=weight_OD.device)
    for shape in shapes_of(len(x_D), sizes):
        gemv(x_D, weight_OD, None, sizes, None, shape=shape)


def fastest(weights_OD: Sequence[Tensor], sizes: Sequence[int]) -> Shape | None:
    """The shape with which `gemv` beats torch's own GEMM most; None if none does.

    Measured in a CUDA graph over all of `weights_OD`, which together should be more than the L2 cache holds.
    """
    x = torch.randn(1, weights_OD[0].shape[1], dtype=weights_OD[0].dtype, device=weights_OD[0].device)
    best, chosen = _milliseconds(lambda w: torch.nn.functional.linear(x, w), weights_OD), None
    for block, warps in shapes_of(x.shape[1], sizes):
        own = partial(gemv, x[0], bias_O=None, sizes=sizes, lora=None, shape=(block, warps))
        try:
            spent = _milliseconds(lambda w, own=own: own(weight_OD=w), weights_OD)
        except triton.runtime.errors.OutOfResources:  # a shape too large for this device
            continue
        if spent < best:
            best, chosen = spent, (block, warps)
    return chosen


def _milliseconds(call: Callable[[Tensor], Tensor], weights_OD: Sequence[Tensor]) -> float:
    def run() -> None:
        for weight in weights_OD:
            call(weight)

    for weight in weights_OD[:2]:
        call(weight)
    return graph_ms(run)


def gemv(
    x_D: Tensor,
    weight_OD: Tensor,
    bias_O: Tensor | None,
    sizes: Sequence[int],
    lora: DecodeTables | None,
    *,
    shape: Shape,
) -> Tensor:
    """(O): `weight x + bias`, and the adapter of `lora`'s only tile.

    `shape`: one of `shapes_of`, or `adapter_shape`.
    """
    O, D = weight_OD.shape
    device, block_k = x_D.device, next_power_of_2(D)
    (block, warps), pdl = shape, device_info(x_D.device).early_launch
    options = {"PDL": pdl} if interpreted() else {"PDL": pdl, "launch_pdl": pdl}
    y = torch.empty(O, dtype=x_D.dtype, device=device)
    ends = [sum(sizes[: i + 1]) if i < len(sizes) - 1 else O for i in range(2)]
    sites, shards, splits, R, width, row, narrowed = len(sizes), 1, 1, RANK_BLOCK, RANK_BLOCK, 0, False
    h, tiles_, addresses, ranks, scalings = (y,) * 5
    if lora is not None:
        tiles, table, R, exchange = lora
        h = decode_shrink(x_D[None], tiles, table, R, DecodeBlocks(), exchange=exchange)
        shards, splits, _, _, width = h.shape
        if exchange is not None and exchange.outputs is not None:
            ends, narrowed = list(exchange.outputs), True
        row = table.ranks.stride(0)
        tiles_, addresses, ranks, scalings = tiles.tiles, table.addresses, table.ranks, table.scalings
    launch(
        project, (cdiv(O, block),),
        x_D, weight_OD, y if bias_O is None else bias_O, y, h, tiles_, addresses, ranks, scalings,
        D, O, *ends, row, width, LORA=lora is not None, BIAS=bias_O is not None, SITES=sites, SPLITS=splits,
        SPLITS_POW2=next_power_of_2(splits), SHARDS=shards, SLICE=narrowed, BLOCK_N=block, BLOCK_K=block_k,
        BLOCK_R=max(RANK_BLOCK, next_power_of_2(R)), num_warps=warps, num_stages=1, **options,
    )  # fmt: skip
    return y
