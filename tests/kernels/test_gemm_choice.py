"""What a warm-up compiles before it measures GEMM kernels is what it measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from coserve.kernels.gemm import gemv, skinny
from coserve.kernels.lora.types import StackedWeights
from coserve.model.gemm_choice import GemmChoice, measure_gemms, run_gemms

CPU = torch.device("cpu")
WEIGHTS = ((4096, (512, 128, 128)), (2048, (512,)), (4096, (1024, 1024)))
"""Inputs, and the outputs of each site."""


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_all_kernels_that_are_measured_are_compiled_first(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
    stacked = [
        StackedWeights(torch.zeros(sum(sizes), inputs, dtype=torch.bfloat16), None, sizes) for inputs, sizes in WEIGHTS
    ]
    run_gemms(stacked, CPU, (rows,))
    compiled = set(found)
    found.clear()
    measure_gemms(stacked, CPU, (rows,))
    assert len(compiled) > 3 and found == compiled


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("before_shrink", [False, True])
def test_rows_before_a_shrink_go_by_a_shape_of_their_own(rows: int, before_shrink: bool) -> None:
    """Which the shrink may overlap, as its workspace says; one row goes by the skinny GEMM only there."""
    x, weight, bias = torch.randn(rows, 256), torch.randn(96, 256), torch.randn(96)
    one = {(16, 256, 96): skinny.Shape(32, 128, 1, 4, 2)}
    split = {(16, 256, 96): skinny.Shape(32, 128, 2, 4, 2)}
    choice = GemmChoice({(256, 96): (2, 4)}, one, skinny.make_counters(96, CPU), split)
    found = choice.linear(x, weight, bias, before_shrink=before_shrink)
    torch.testing.assert_close(found.y, torch.nn.functional.linear(x, weight, bias), rtol=1e-4, atol=1e-4)
    assert (found.workspace is not None) == (before_shrink or rows > 1)
    if found.workspace is not None:
        assert (found.workspace.dtype is torch.float32 and found.workspace.dim() == 3) == before_shrink


@pytest.mark.parametrize("rows", [1, 2])
def test_rows_before_a_shrink_go_as_others_where_the_skinny_gemm_is_slow(rows: int) -> None:
    x, weight = torch.randn(rows, 256), torch.randn(96, 256)
    choice = GemmChoice({(256, 96): (2, 4)}, {}, skinny.make_counters(96, CPU))
    found = choice.linear(x, weight, None, before_shrink=True)
    torch.testing.assert_close(found.y, torch.nn.functional.linear(x, weight), rtol=1e-4, atol=1e-4)
    assert found.workspace is None


@pytest.mark.parametrize(
    ("ours", "alone", "beside"), [(0.009, True, True), (0.011, False, True), (0.014, False, False)]
)
def test_a_shrink_pays_for_a_gemm_that_is_a_little_slower(
    ours: float, alone: bool, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's takes 10 us."""
    times = iter([0.010])
    monkeypatch.setattr(skinny, "graph_ms", lambda _run: next(times, ours))
    monkeypatch.setattr(skinny, "launch", lambda *_given, **_options: None)
    weight = torch.zeros(128, 256, dtype=torch.bfloat16)
    found = skinny.fastest([weight], skinny.make_counters(128, CPU), 2)
    assert (found.alone is not None, found.beside_shrink is not None) == (alone, beside)
