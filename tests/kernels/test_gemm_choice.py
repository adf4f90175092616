"""What a warm-up compiles before it measures GEMM kernels is what it measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from coserve.kernels.gemm import gemv, skinny
from coserve.kernels.lora.types import StackedWeights
from coserve.model.gemm_choice import measure_gemms, run_gemms

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
