"""Under Triton's interpreter without a GPU; the bfloat16 grid of a GPU is in `test_kernels_gpu`."""

from __future__ import annotations

import pytest
import torch

from coserve.kernels import segmented
from tests.support.lora_grids import GRIDS, Grid, check_forward, check_gradients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
named = pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)


@named
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_decode_forward(grid: Grid, dtype: torch.dtype) -> None:
    check_forward(segmented.lora_add, grid, dtype, DEVICE)


@named
def test_long_forward(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segmented, "tile_rows", lambda _: (segmented.LONG_ROWS, False))
    check_forward(segmented.lora_add, grid, torch.float32, DEVICE)


@named
def test_gradients(grid: Grid) -> None:
    check_gradients(segmented.lora_add, grid, torch.float32, DEVICE)
