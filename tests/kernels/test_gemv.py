from __future__ import annotations

import pytest
import torch

from coserve.kernels.gemm.gemv import ADAPTER_SHAPES, SHAPES, WAVE_SHAPE, adapter_shape, gemv, shapes_of
from coserve.kernels.lora import reference
from coserve.kernels.lora.segmented.adapter_table import Slots, table_entries
from coserve.kernels.lora.segmented.plan import DecodeTables
from coserve.kernels.lora.segmented.sharded_slot_lora import GEMV_ROWS
from coserve.kernels.lora.segmented.tiles import StepTiles, cut
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair
from tests.support.examples import sample


@pytest.mark.parametrize(
    ("sizes", "rank", "a_blocks", "b_blocks"),
    [
        ((48, 16, 16), 4, 1, 1),
        ((32, 32), 20, 1, 1),
        ((40,), 16, 1, 1),
        ((24,), 0, 1, 1),
        ((48, 16, 32), 20, 1, 4),
        ((32,), 32, 1, 2),
        ((40,), 20, 4, 1),
    ],
)
@pytest.mark.parametrize("bias", sample([False, True], True))
def test_one_row_with_its_adapter(sizes: tuple[int, ...], rank: int, a_blocks: int, b_blocks: int, bias: bool) -> None:
    """Among other adapters in the table; rank 0: no adapter in the tile."""
    g = torch.Generator().manual_seed(rank)
    x, weight = torch.randn(1, 72, generator=g), torch.randn(sum(sizes), 72, generator=g)
    added = torch.randn(sum(sizes), generator=g) if bias else None
    base = torch.nn.functional.linear(x, weight, added)
    slots, step = Slots(3, len(sizes), x.device), StepTiles(8, 1, 2, 1, x.device)
    pairs = [
        LoraPair(
            torch.randn(rank or 4, 72 // a_blocks, generator=g),
            torch.randn(size, (rank or 4) // b_blocks, generator=g),
            0.5,
            a_blocks=a_blocks,
            b_blocks=b_blocks,
        )
        for size in sizes
    ]
    slots.put(2, *table_entries(pairs))
    segments = Segments((0, 1), (2 if rank else -1,))
    step.load(cut(segments, (0, 0, rank), 8))
    expected = base
    if rank:
        parts = base.split(sizes, 1)
        expected = torch.cat(
            [reference.lora_add(y, x, Segments((0, 1), (0,)), [p]) for y, p in zip(parts, pairs, strict=True)], 1
        )
    got = gemv(x[0], weight, added, sizes, DecodeTables(step.tiles, slots.table(0, len(sizes)), 32), shape=(8, 4))
    torch.testing.assert_close(got, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gemv(x[0], weight, added, sizes, None, shape=(4, 4)), base[0], rtol=1e-4, atol=1e-4)


def test_blocks_end_where_sites_end() -> None:
    assert (4, 4) in shapes_of(4096, (4096, 1024, 1024))
    assert all(block == 1 for block, _ in shapes_of(14336, (4097,)))
    assert shapes_of(40000, (4096,)) == []


@pytest.mark.parametrize(
    ("inputs", "sizes", "rank", "expected"),
    [
        (4096, (14336, 14336), 16, (2, 4)),
        (4096, (14336, 14336), 128, (4, 8)),
        (4096, (2048, 512, 512), 16, (8, 4)),  # one wave
        (2048, (4096,), 256, (8, 4)),
        (7168, (4096,), 128, (4, 4)),
        (14336, (4096,), 256, (1, 4)),
        (14336, (4096,), 512, (4, 4)),  # not measured
        (1024, (4096,), 16, (4, 4)),
        (4096, (4098, 4099), 128, (4, 4)),  # blocks do not end where sites end
    ],
)
def test_shapes_with_an_adapter(inputs: int, sizes: tuple[int, ...], rank: int, expected: tuple[int, int]) -> None:
    assert adapter_shape(inputs, sizes, rank, 132, (4, 4)) == expected


def test_no_program_reads_more_rows_than_outputs_of_a_gpu_are_aligned_to() -> None:
    shapes = {*SHAPES, WAVE_SHAPE, *(shape for found in ADAPTER_SHAPES.values() for _, shape in found)}
    assert all(GEMV_ROWS % rows == 0 for rows, _ in shapes)
