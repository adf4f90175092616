"""Launches of the kernel that scales the rows of DoRA adapters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from coserve.kernels.gpu.launcher import Launcher
from coserve.kernels.gpu.rounding import cdiv
from coserve.kernels.lora.segmented import scale_kernel
from coserve.kernels.lora.segmented.adapter_table import SiteTable
from coserve.kernels.lora.segmented.tiles import Tiles

BLOCK_O = 128
"""Outputs of a program."""
SCALE = Launcher(scale_kernel.scale)


def scale_rows(ys: Sequence[Tensor], tiles: Tiles, table: SiteTable, biases: Sequence[Tensor | None]) -> None:
    """Compute `y = scale (y - bias) + bias` in place, for the rows of each site's y (T, O) whose adapter is DoRA there.

    The terms are added before. Can be captured: the contents of `tiles` and `table` may change between replays.
    """
    assert table.scales is not None, "expected a table of slots"
    if not tiles.tiles.shape[0]:
        return
    for site, (y, bias) in enumerate(zip(ys, biases, strict=True)):
        scales = table.scales[:, site]
        SCALE(
            (cdiv(y.shape[1], BLOCK_O), tiles.tiles.shape[0], 1),
            (y, y if bias is None else bias, tiles.tiles, scales),
            (y.shape[1], y.stride(0), scales.stride(0)),
            BLOCK_T=tiles.rows,
            BLOCK_O=BLOCK_O,
            BIASED=bias is not None,
            num_warps=4,
        )
