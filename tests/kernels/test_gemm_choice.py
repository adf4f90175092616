"""What a warm-up compiles before it measures GEMM kernels is what it measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from coserve.kernels.gemm import gemv, skinny
from coserve.kernels.lora.types import FrozenWeight
from coserve.kernels.quantized import fp8
from coserve.kernels.quantized.weights import Fp8Weight
from coserve.model.gemm_choice import GemmChoice, measure_gemms, run_gemms

CPU = torch.device("cpu")
WEIGHTS = ((4096, (512, 128, 128)), (2048, (512,)), (4096, (1024, 1024)))
"""Inputs, and the outputs of each site."""


@pytest.mark.parametrize(("rows", "quantized"), [(1, False), (16, False), (64, False), (16, True), (64, True)])
@pytest.mark.slow
def test_all_kernels_that_are_measured_are_compiled_first(
    rows: int, quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = set[object]()

    def record(_kernel: object, _grid: object, *given: Any, **constants: Any) -> None:
        numbers = tuple(each for each in given if not isinstance(each, torch.Tensor))
        found.add((numbers, tuple(constants.items())))

    def timed(run: Callable[[], None]) -> float:
        run()
        return 1.0

    for module in (gemv, skinny):
        monkeypatch.setattr(module, "launch", record)
        monkeypatch.setattr(module, "graph_ms", timed)
    stacked: list[FrozenWeight] = []
    for inputs, sizes in WEIGHTS:
        weight = torch.zeros(sum(sizes), inputs, dtype=torch.bfloat16)
        if quantized:
            codes, scales = fp8.quantize(weight)
            stacked.append(Fp8Weight(codes, None, sizes, scales))
        else:
            stacked.append(FrozenWeight(weight, None, sizes))
    monkeypatch.setattr(fp8, "has_tensor_cores", lambda x: True)
    run_gemms(stacked, CPU, (rows,))
    compiled = set(found)
    found.clear()
    measure_gemms(stacked, CPU, (rows,))
    assert len(compiled) > 3 and found == compiled
    rounded = [constants["X_SCALE"] for _, constants in ((one, dict(two)) for one, two in compiled) if rows > 1]
    assert all(rounds is (quantized and rows > fp8.FEW_ROWS) for rounds in rounded)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("before_shrink", [False, True])
def test_a_row_before_a_shrink_goes_by_the_skinny_gemm(rows: int, before_shrink: bool) -> None:
    """Which the shrink may overlap, as its workspace says."""
    x, weight, bias = torch.randn(rows, 256), torch.randn(96, 256), torch.randn(96)
    shapes = {(16, 256, 96): skinny.Shape(32, 128, 1, 4, 2)}
    choice = GemmChoice({(256, 96): (2, 4)}, shapes, skinny.make_counters(96, CPU))
    found = choice.linear(x, weight, bias, before_shrink=before_shrink)
    torch.testing.assert_close(found.y, torch.nn.functional.linear(x, weight, bias), rtol=1e-4, atol=1e-4)
    assert (found.workspace is not None) == (before_shrink or rows > 1)


def test_a_skinny_gemm_is_chosen_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    stacked = [FrozenWeight(torch.zeros(sum(sizes), inputs), None, sizes) for inputs, sizes in WEIGHTS]
    shape = skinny.SHAPES[0]

    def fastest(weights: list[FrozenWeight], *_: object) -> skinny.Shape | None:
        return shape if sum(weights[0].sizes) == 2048 else None

    monkeypatch.setattr(skinny, "fastest", fastest)
    assert measure_gemms(stacked, CPU, (16,)).skinny == {(16, 4096, 2048): shape}


def test_a_row_before_a_shrink_goes_by_the_gemv_where_the_skinny_gemm_is_slow() -> None:
    x, weight = torch.randn(1, 256), torch.randn(96, 256)
    found = GemmChoice({(256, 96): (2, 4)}).linear(x, weight, None, before_shrink=True)
    torch.testing.assert_close(found.y, torch.nn.functional.linear(x, weight), rtol=1e-4, atol=1e-4)
    assert found.workspace is None
