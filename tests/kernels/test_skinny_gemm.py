from __future__ import annotations

import pytest
import torch

from coserve.kernels.gemm.skinny import ROWS, SHAPES, Shape, make_counters, rows_of, shapes_of, skinny_gemm
from coserve.kernels.gpu.device import interpreted
from coserve.kernels.lora.segmented.adapter_table import Slots, slot_columns
from coserve.kernels.lora.segmented.plan import TilePlan
from coserve.kernels.lora.segmented.terms import add_
from coserve.kernels.lora.segmented.tiles import cut, upload
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair
from tests.support.lora_grids import relative_error

SMALL = (Shape(16, 16, 1, 4, 2), Shape(32, 16, 2, 4, 2), Shape(16, 32, 4, 4, 2))


@pytest.mark.parametrize(
    ("shape", "rows", "bias"),
    [
        (SMALL[0], 1, True),
        (SMALL[0], 64, False),
        (SMALL[1], 9, False),
        (SMALL[1], 17, True),
        (SMALL[2], 16, True),
        (SMALL[2], 17, False),
    ],
)
def test_rows_through_a_weight(shape: Shape, rows: int, bias: bool) -> None:
    """Outputs that are no multiple of a block, rows with a stride, and counters that are zeros again."""
    g = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 160, generator=g)[:, :128].half()
    weight = torch.randn(40, 128, generator=g).half()
    added = torch.randn(40, generator=g).half() if bias else None
    counters = torch.zeros(3, dtype=torch.int32)
    expected = torch.nn.functional.linear(x.float(), weight.float(), None if added is None else added.float())
    for _ in range(2):
        got, _ = skinny_gemm(x, weight, added, counters, shape)
        torch.testing.assert_close(got.float(), expected, rtol=2e-3, atol=2e-2)
    assert not counters.any()


def test_who_is_served() -> None:
    assert [rows_of(n) for n in (1, 2, 16, 17, 64, 65)] == [16, 16, 16, 32, 64, None]
    assert [shape.n for shape in shapes_of(4096, 6144, torch.bfloat16, 32)] == [64, 64, 32, 32, 16]
    assert [shape.n for shape in shapes_of(1024, 1024, torch.bfloat16, 16)] == [32, 32, 16, 16, 16]
    assert shapes_of(4096, 6144, torch.float32, 64) == []
    assert {shape.splits for shape in shapes_of(4096 + 256, 4096, torch.bfloat16, 32)} == {1, 2}
    assert {shape.splits for shape in shapes_of(4096 + 128, 4096, torch.bfloat16, 32)} == {1}
    wide = {shape.n for shape in shapes_of(4096, 24576, torch.bfloat16, 64)}
    assert wide == {64, 128}, "expected large blocks of outputs for many rows"
    assert shapes_of(100, 6144, torch.float16, 64) == []
    assert shapes_of(4096, 16, torch.float16, 32) == list(SHAPES), (
        "expected some where none has a fair number of programs"
    )


@pytest.mark.gpu
@pytest.mark.skipif(interpreted(), reason="the interpreter runs nothing side by side")
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 6144), (4096, 4096), (14336, 4096), (1024, 3000)])
@pytest.mark.parametrize("rows", [1, 2, *ROWS, 33])
def test_rows_in_a_graph(inputs: int, outputs: int, rows: int) -> None:
    """In bfloat16, x made by the kernel right ahead, as often as a model has layers."""
    device, g = torch.device("cuda"), torch.Generator("cuda").manual_seed(rows)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device=device, dtype=torch.bfloat16)

    weight, bias, given = draw(outputs, inputs) * 0.02, draw(outputs), draw(rows, inputs)
    x, counters = torch.empty_like(given), make_counters(outputs, device)
    for shape in shapes_of(inputs, outputs, torch.bfloat16, rows_of(rows) or rows):

        def run(shape: Shape = shape) -> list[torch.Tensor]:
            found = []
            for scale in range(1, 9):
                torch.mul(given, scale, out=x)
                found.append(skinny_gemm(x, weight, bias, counters, shape)[0])
            return found

        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run()
        for y in got:
            y.fill_(float("nan"))
        given.copy_(draw(rows, inputs))
        graph.replay()
        for scale, y in enumerate(got, 1):
            expected = torch.nn.functional.linear((given * scale).float(), weight.float(), bias.float())
            assert (y.float() - expected).norm() <= 1e-2 * expected.norm(), (shape, scale)
        assert not counters.any()


@pytest.mark.gpu
@pytest.mark.skipif(interpreted(), reason="the interpreter runs nothing side by side")
@pytest.mark.parametrize(("inputs", "sizes"), [(4096, (4096, 1024, 1024)), (14336, (4096,)), (1024, (3072,))])
@pytest.mark.parametrize("rows", [2, 16, 64])
def test_the_shrink_beside_a_product(inputs: int, sizes: tuple[int, ...], rows: int) -> None:
    """LoRA terms that start when x is complete, not when the product is, are those that wait: in a graph, again and
    again, over memory that holds other numbers each time."""
    device, g = torch.device("cuda"), torch.Generator("cuda").manual_seed(rows)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device=device, dtype=torch.bfloat16)

    outputs, slots = sum(sizes), Slots(4, len(sizes), device)
    weight, given, x = draw(outputs, inputs) * 0.02, draw(rows, inputs), draw(rows, inputs)
    ranks = (16, 40, 8, 64)
    held = [[LoraPair(draw(rank, inputs), draw(width, rank), 0.5) for width in sizes] for rank in ranks]
    for slot, pairs in enumerate(held):
        slots.put(slot, *slot_columns(pairs))
    table, counters = slots.table(0, len(sizes)), make_counters(outputs, device)
    bounds = sorted({0, 1, rows // 3, rows // 2, rows})
    segments = Segments(tuple(bounds), tuple(range(len(bounds) - 1)))
    tiles = upload(cut(segments, ranks, 8), 8, rows, device)
    plan = TilePlan(tiles, 64, True)
    for shape in shapes_of(inputs, outputs, torch.bfloat16, rows_of(rows) or rows):

        def run(*, apart: bool, overlapped: bool = True, shape: Shape = shape) -> list[torch.Tensor]:
            found = []
            for scale in range(1, 9):
                torch.mul(given, scale, out=x)
                y, _scratch = skinny_gemm(x, weight, None, counters, shape)
                ys = list(torch.split(y, list(sizes), 1))
                if apart:
                    torch.cuda.synchronize()
                add_(ys, x, plan, table, overlapped=overlapped)
                found.append(y)
                x.fill_(float("nan"))
            return found

        run(apart=False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run(apart=False)
        for again in range(5):
            given.copy_(draw(rows, inputs))
            expected, behind = run(apart=True), run(apart=True, overlapped=False)
            graph.replay()
            for scale, (mine, other, third) in enumerate(zip(got, expected, behind, strict=True), 1):
                assert mine.equal(other), (shape, again, scale)
                assert relative_error(mine, third) <= 1e-2, (shape, again, scale)
