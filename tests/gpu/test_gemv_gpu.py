"""One row through stacked weights, in bfloat16, captured, with its adapter: nothing must be read too early."""

from __future__ import annotations

import pytest
import torch

from coserve.kernels.gemm import skinny
from coserve.kernels.gemm.gemv import gemv, shapes_of
from coserve.kernels.lora import reference
from coserve.kernels.lora.segmented.adapter_table import Slots, slot_columns
from coserve.kernels.lora.segmented.launch_decode import decode
from coserve.kernels.lora.segmented.plan import TilePlan
from coserve.kernels.lora.segmented.tiles import StepTiles, cut
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("inputs", "sizes"), [(4096, (4096, 1024, 1024)), (4096, (14336, 14336)), (14336, (4096,))])
def test_single_row_in_a_graph(inputs: int, sizes: tuple[int, ...]) -> None:
    """x is made by the kernel right ahead, for several adapters in turn and for none."""
    device, g = torch.device("cuda"), torch.Generator("cuda").manual_seed(inputs)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device=device, dtype=torch.bfloat16)

    weight, x, given = draw(sum(sizes), inputs) * 0.02, draw(1, inputs), draw(1, inputs)
    ranks = (16, 5, 128)
    slots, step = Slots(3, len(sizes), device), StepTiles(8, 1, 8, 1, device)
    pairs = [[LoraPair(draw(rank, inputs) * 0.02, draw(size, rank) * 0.02, 0.5) for size in sizes] for rank in ranks]
    for slot, own in enumerate(pairs):
        slots.put(slot, *slot_columns(own))
    plan = TilePlan(step.tiles, 128, decode=True)
    counters = skinny.make_counters(sum(sizes), device)
    for shape in (*shapes_of(inputs), *skinny.shapes_of(inputs, sum(sizes), x.dtype, 16)):

        def run(shape: tuple[int, int] | skinny.Shape = shape) -> torch.Tensor:
            torch.mul(given, 2, out=x)
            if isinstance(shape, skinny.Shape):
                y, _workspace = skinny.skinny_gemm(x, weight, None, counters, shape)
            else:
                y = gemv(x[0], weight, None, shape).view(1, -1)
            overlapped = isinstance(shape, skinny.Shape)
            decode(torch.split(y, sizes, 1), x, plan, slots.table(0, len(sizes)), overlapped=overlapped)
            return y

        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run()
        for slot in (0, -1, 2, 1):
            torch.cuda.synchronize()
            step.load(cut(Segments((0, 1), (slot,)), ranks, 8))
            given.copy_(draw(1, inputs))
            got.fill_(float("nan"))
            graph.replay()
            base = torch.nn.functional.linear(x.float(), weight.float())
            parts = list(torch.split(base, sizes, 1))
            if slot >= 0:
                one = Segments((0, 1), (0,))
                parts = [reference.lora_add(y, x, one, [p]) for y, p in zip(parts, pairs[slot], strict=True)]
            expected = torch.cat(parts, 1).float()
            assert (got.float() - expected).norm() <= 1e-2 * expected.norm(), (shape, slot)
