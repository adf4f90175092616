"""Which shape of the GEMV is fastest, with an adapter and without, measured on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import triton
from torch import Tensor

from coserve.kernels.gemm.gemv import gemv, shapes_of
from coserve.kernels.gpu.launcher import compile_only
from coserve.kernels.gpu.timing import graph_ms
from coserve.kernels.lora.segmented.adapter_table import RANK_BLOCK, Slots, table_entries
from coserve.kernels.lora.segmented.plan import DECODE_ROWS, DecodeTables
from coserve.kernels.lora.segmented.tiles import StepTiles, cut
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair

MEASURED_RANK = 64
"""Of the adapters that shapes are measured with."""

Shape = tuple[int, int]
"""One of `gemv.SHAPES`."""
Run = Callable[[], None]
"""All weights, one after another."""


def fastest(weights_OD: Sequence[Tensor], sizes: Sequence[int]) -> Shape | None:
    """The shape with which `gemv` beats torch's own GEMM most; None if none does.

    Measured in a CUDA graph over all of `weights_OD`, which together should be more than the L2 cache holds.
    """
    x_D = _inputs(weights_OD)

    def run_torch() -> None:
        for weight in weights_OD:
            torch.nn.functional.linear(x_D[None], weight)

    run_torch()
    return _best(
        partial(_run, x_D, weights_OD, sizes, [None] * len(weights_OD)), shapes_of(len(x_D), sizes), graph_ms(run_torch)
    )


def fastest_with_adapter(weights_OD: Sequence[Tensor], sizes: Sequence[int]) -> Shape | None:
    """The shape that is fastest with an adapter on all sites: it waits for the shrink, and has more to keep in registers. None if
    no shape can run."""
    x_D = _inputs(weights_OD)
    made = [_adapter(weight, sizes) for weight in weights_OD]
    tables = [tables for tables, _ in made]
    return _best(partial(_run, x_D, weights_OD, sizes, tables), shapes_of(len(x_D), sizes), float("inf"))


def _inputs(weights_OD: Sequence[Tensor]) -> Tensor:
    return torch.randn(weights_OD[0].shape[1], dtype=weights_OD[0].dtype, device=weights_OD[0].device)


def _adapter(weight_OD: Tensor, sizes: Sequence[int]) -> tuple[DecodeTables, object]:
    """Tables of an adapter, and what must stay alive while they are used."""
    device = weight_OD.device
    slots = Slots(1, len(sizes), device, blocked=False)
    a = [weight_OD.new_zeros(MEASURED_RANK, weight_OD.shape[1]) for _ in sizes]
    b = [weight_OD.new_zeros(size, MEASURED_RANK) for size in sizes]
    slots.put(0, *table_entries([LoraPair(*pair, 1.0) for pair in zip(a, b, strict=True)]))
    step = StepTiles(DECODE_ROWS[0], 1, MEASURED_RANK // RANK_BLOCK, 1, device)
    step.load(cut(Segments((0, 1), (0,)), (MEASURED_RANK,), DECODE_ROWS[0]))
    return DecodeTables(step.tiles, slots.table(0, len(sizes)), MEASURED_RANK), (slots, step)


def _run(
    x_D: Tensor, weights_OD: Sequence[Tensor], sizes: Sequence[int], tables: Sequence[DecodeTables | None], shape: Shape
) -> None:
    for weight, lora in zip(weights_OD, tables, strict=True):
        gemv(x_D, weight, None, sizes, lora, shape=shape)


def _best(run: Callable[[Shape], None], shapes: Sequence[Shape], least: float) -> Shape | None:
    """The shape whose run takes less than `least` milliseconds and than those of the others."""
    chosen: Shape | None = None
    with ThreadPoolExecutor(max(1, len(shapes)), "compile") as threads, compile_only(threads):
        for shape in shapes:
            run(shape)
    for shape in shapes:
        try:
            run(shape)
            spent = graph_ms(partial(run, shape))
        except triton.runtime.errors.OutOfResources:  # a shape too large for this device
            continue
        if spent < least:
            least, chosen = spent, shape
    return chosen
