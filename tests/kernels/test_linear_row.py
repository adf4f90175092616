"""One row through sites of one input, LoRA terms included, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from coserve.kernels.gpu.device import interpreted
from coserve.kernels.lora.segmented.launch_row import MOST_RANK, RowShape, linear_row, serves
from coserve.kernels.lora.segmented.plan import GroupTable, TilePlan, plan_of, tables_of
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.shrinks import Shrinks
from coserve.kernels.lora.types import LoraPair

CPU = torch.device("cpu")
SCALING = 1.5


def _tables(
    inputs: int, sizes: Sequence[int], ranks: Sequence[int], generator: torch.Generator
) -> tuple[GroupTable, list[list[LoraPair | None]]]:
    """Two sets of tables, whose second slot has adapters of these ranks at the sites; 0: none."""

    def drawn(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).half()

    own = [
        LoraPair(drawn(rank, inputs), drawn(size, rank), SCALING) if rank else None
        for size, rank in zip(sizes, ranks, strict=True)
    ]
    other = LoraPair(drawn(3, inputs), drawn(sizes[0], 3), 1.0)
    pairs = [[other if site == 0 else None, pair] for site, pair in enumerate(own)]
    (table,) = tables_of([pairs], CPU)
    return table, pairs


def _plan(table: GroupTable) -> TilePlan:
    return plan_of(Segments((0, 1), (1,)), table.ranks, CPU, train=False)


@pytest.mark.parametrize("shape", [RowShape(1, 4, 4), RowShape(4, 2, 4), RowShape(8, 8, 4)], ids=str)
@pytest.mark.parametrize(
    ("inputs", "sizes", "ranks", "bias"),
    [(72, (16, 8, 8), (13, 13, 5), True), (128, (36,), (16,), False), (100, (24, 20), (0, 33), False)],
)
def test_a_row(inputs: int, sizes: tuple[int, ...], ranks: tuple[int, ...], bias: bool, shape: RowShape) -> None:
    """Launch after launch, with other weights."""
    generator = torch.Generator().manual_seed(inputs)
    weight = (torch.randn(sum(sizes), inputs, generator=generator) / inputs**0.5).half()
    added = torch.randn(sum(sizes), generator=generator).half() if bias else None
    shrinks = Shrinks(CPU)
    shrinks.begin()
    for _ in range(3):
        table, pairs = _tables(inputs, sizes, ranks, generator)
        plan, x = _plan(table), torch.randn(inputs, generator=generator).half()
        expected = functional.linear(x.float(), weight.float(), None if added is None else added.float())
        for part, (_, pair) in zip(torch.split(expected, list(sizes)), pairs, strict=True):
            if pair is not None:
                part += SCALING * (x.float() @ pair.a_RD.float().T) @ pair.b_OR.float().T
        assert serves(sizes, plan, table.table, shape)
        got = linear_row(x, weight, added, sizes, shrinks, plan, table.table, shape)
        torch.testing.assert_close(got.float(), expected, rtol=2e-3, atol=5e-3)


def test_a_shrink_that_is_no_number_keeps_nobody_waiting() -> None:
    generator = torch.Generator().manual_seed(0)
    table, _ = _tables(64, (16,), (16,), generator)
    shrinks = Shrinks(CPU)
    shrinks.begin()
    x, weight = torch.full((64,), torch.nan).half(), torch.ones(16, 64).half()
    assert linear_row(x, weight, None, (16,), shrinks, _plan(table), table.table).isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(interpreted(), reason="the interpreter runs nothing side by side")
def test_rows_in_a_graph() -> None:
    """Launches that start while the preceding one still runs, over and over, with other rows."""
    cuda, inputs, sizes, rank = torch.device("cuda"), 4096, (1024, 256, 256), 77

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=cuda, dtype=torch.bfloat16) / shape[-1] ** 0.5

    weight, x, shrinks = drawn(sum(sizes), inputs), drawn(inputs), Shrinks(cuda)
    pairs = [[LoraPair(drawn(rank, inputs), drawn(size, rank), SCALING)] for size in sizes]
    (table,) = tables_of([pairs], cuda)
    plan = plan_of(Segments((0, 1), (0,)), table.ranks, cuda, train=False)

    def run() -> list[Tensor]:
        shrinks.begin()
        return [linear_row(x, weight, None, sizes, shrinks, plan, table.table) for _ in range(33)]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(20):
        x.copy_(torch.randn(inputs, device=cuda))
        graph.replay()
        expected = x.float() @ weight.float().T
        terms = [SCALING * (x.float() @ own.a_RD.float().T) @ own.b_OR.float().T for (own,) in pairs]
        expected += torch.cat(terms)
        for got in found:
            torch.testing.assert_close(got.float(), expected, rtol=2e-2, atol=2e-2)


def test_what_is_served() -> None:
    generator = torch.Generator().manual_seed(0)
    table, _ = _tables(64, (16, 8), (8, 8), generator)
    plan = _plan(table)
    assert serves((16, 8), plan, table.table)
    assert not serves((18, 6), plan, table.table), "expected whole blocks of outputs"
    assert not serves((16, 8, 8), plan, table.table), "expected one launch for all sites"
    wide, _ = _tables(64, (16,), (MOST_RANK + 1,), generator)
    assert not serves((16,), _plan(wide), wide.table)
    longer = plan_of(Segments((0, 100), (1,)), table.ranks, CPU, train=False)
    assert not serves((16, 8), longer, table.table), "expected a plan of the decode kernels"
