"""Times products of few rows with an 8B layer's weights: a part of `benchmarks.quant.quantized`.

In a CUDA graph over weights that exceed the L2 cache, a small kernel (`before`) ahead of each product, for
`bf16`         torch's GEMM of 16-bit weights
`x16`          our kernel that reads FP8 weights, x in 16 bits
`scaled_mm`    x rounded to FP8, then torch's GEMM
`rounded`      x rounded to FP8, then our kernel; `rounded_alone`: without fetching weights while x is rounded
Ours with the fastest of their block sizes, which are named too. `floor`: FP8 weights at `BYTES_PER_US`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import triton
from torch import Tensor

from benchmarks.common.results import Results
from coserve.kernels.gemm import gemv, skinny
from coserve.kernels.gemm.skinny import Shape, skinny_gemm
from coserve.kernels.lora.types import FrozenWeight
from coserve.kernels.quantized import fp8
from coserve.kernels.quantized.weights import Fp8Weight
from coserve.model.gemm_choice import L2_BYTES

SIZES = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
"""Inputs and outputs of an 8B layer's products."""
ROWS = (1, 8, 16, 32, 64)
BYTES_PER_US = 4.8e6
"""Published for an H200."""
Product = Callable[[Tensor, FrozenWeight], object]


def measure_few_rows(results: Results, device: torch.device, *, tiny: bool) -> None:
    """Put a row for each weight: how much faster 64 rows are in FP8 than in bf16, and all microseconds."""
    for inputs, outputs in ((1024, 256),) if tiny else SIZES:
        about: dict[str, object] = {"floor": round(inputs * outputs / BYTES_PER_US, 2)}
        weights = _weights(inputs, outputs, device, tiny=tiny)
        for rows in (1, 32) if tiny else ROWS:
            x = torch.randn(rows, inputs, device=device).bfloat16()
            found = _timed(x, weights, tiny=tiny)
            print(inputs, outputs, rows, found, flush=True)
            about |= {f"b{rows}.{name}": value for name, value in found.items()}
        ratio = round(found["bf16"] / min(value for name, value in found.items() if name not in ("before", "bf16")), 3)
        results.put(f"quant.fp8.few_rows.{inputs}x{outputs}", ratio, "x of bf16", None, (), about)


def _weights(inputs: int, outputs: int, device: torch.device, *, tiny: bool) -> list[tuple[FrozenWeight, Fp8Weight]]:
    found = []
    for _ in range(2 if tiny else -(-L2_BYTES // (inputs * outputs))):
        weight = torch.randn(outputs, inputs, device=device).bfloat16() * 0.02
        codes, scales = fp8.quantize(weight)
        found.append((FrozenWeight(weight, None, (outputs,)), Fp8Weight(codes, None, (outputs,), scales)))
    return found


def _timed(x_TD: Tensor, weights: Sequence[tuple[FrozenWeight, Fp8Weight]], *, tiny: bool) -> dict[str, float]:
    """Microseconds of a product, by kind."""
    dense, stored = [one for one, _ in weights], [one for _, one in weights]
    (rows, inputs), outputs = x_TD.shape, stored[0].weight.shape[0]
    counters, most = skinny.make_counters(outputs, x_TD.device), skinny.rows_of(rows) or rows
    chosen: dict[str, str] = {}

    def time_of(product: Product, of: Sequence[FrozenWeight] = stored) -> float:
        if tiny:
            began = time.perf_counter()
            product(x_TD, of[0])
            return 1e6 * (time.perf_counter() - began)
        return 1e3 * skinny.milliseconds(product, x_TD, of) / len(of)

    def best(name: str, products: dict[str, Product]) -> dict[str, float]:
        """The fastest by name. One that this device does not run is printed and left out."""
        spent = dict[str, float]()
        for shape, product in products.items():
            try:
                spent[shape] = time_of(product)
            except (RuntimeError, triton.runtime.errors.OutOfResources) as error:
                print(name, shape, error, flush=True)
        if not spent:
            return {}
        chosen[name] = min(spent, key=lambda shape: spent[shape])
        return {name: spent[chosen[name]]}

    def ours(shapes: Sequence[Shape], *, rounded: bool) -> dict[str, Product]:
        return {str(shape): partial(_skinny, counters=counters, shape=shape, rounded=rounded) for shape in shapes}

    wide = ours(skinny.shapes_of(inputs, outputs, x_TD.dtype, most), rounded=False)
    if rows == 1:
        wide |= {f"gemv {shape}": partial(_gemv, shape=shape) for shape in gemv.shapes_of(inputs)}
    narrow = skinny.shapes_of(inputs, outputs, x_TD.dtype, most, rounded=True)
    alone = [replace(shape, ahead=0) for shape in narrow]
    found = {
        "before": time_of(lambda x, w: None),
        "bf16": time_of(lambda x, w: w.linear(x), dense),
        **best("x16", wide),
        **best("scaled_mm", {"": lambda x, w: fp8.product(x, w.weight, w.scales)}),  # type: ignore[attr-defined]
        **best("rounded", ours(narrow, rounded=True)),
        **best("rounded_alone", ours(alone, rounded=True)),
    }
    print(chosen, flush=True)
    return {name: round(value, 2) for name, value in found.items()}


def _skinny(x_TD: Tensor, weights: FrozenWeight, counters: Tensor, shape: Shape, *, rounded: bool) -> object:
    return skinny_gemm(x_TD, weights.weight, None, counters, shape, weights.row_scales, rounded=rounded)


def _gemv(x_TD: Tensor, weights: FrozenWeight, shape: gemv.Shape) -> object:
    return gemv.gemv(x_TD[0], weights.weight, None, shape, weights.row_scales)
