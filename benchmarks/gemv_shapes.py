"""One row through the linear sites of an 8B Llama, with an adapter and without, by the shape of the GEMV's programs.

    python -m benchmarks.gemv_shapes [--tp 1,2] --out benchmarks/results

For each group of sites that share an input: microseconds of shrink and GEMV in a CUDA graph over eight weights, less those of the small
kernel ahead that makes x. `coserve.kernels.gemm.gemv.ADAPTER_SHAPES` is chosen from `gemv_shapes.json`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from benchmarks.options import make_parser
from benchmarks.provenance import command, gpu_run
from coserve.kernels.gemm.gemv import SHAPES, Shape, gemv
from coserve.kernels.gpu.launcher import compile_only
from coserve.kernels.gpu.rounding import next_power_of_2
from coserve.kernels.gpu.timing import graph_ms
from coserve.kernels.lora.segmented.adapter_table import RANK_BLOCK, Slots, table_entries
from coserve.kernels.lora.segmented.plan import DECODE_ROWS, DecodeTables
from coserve.kernels.lora.segmented.tiles import StepTiles, cut
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair

WEIGHTS = 8
"""More than the L2 cache holds."""
RANKS = {16: 16, 64: 64, 104: 128, 208: 256}
"""Ranks, and those of the graphs that serve them."""
WIDE = ((8, 4), (16, 8))
"""Shapes that are measured besides those that the base alone may have."""
MOST_WEIGHTS = 256
"""Entries of the weight that a thread may hold."""
Sites = tuple[int, tuple[int, ...]]


def sites_of(tp: int) -> list[Sites]:
    """Inputs and outputs of q, k and v; o; gate and up; down, on one of `tp` GPUs."""
    return [
        (4096, (4096 // tp, 1024 // tp, 1024 // tp)),
        (4096 // tp, (4096,)),
        (4096, (14336 // tp, 14336 // tp)),
        (14336 // tp, (4096,)),
    ]


class Case:
    """The weights of one group of sites, and adapters of every rank for each."""

    def __init__(self, inputs: int, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.weights = [self.draw(sum(sizes), inputs) for _ in range(WEIGHTS)]
        self.given, self.x = self.draw(1, inputs), self.draw(1, inputs)
        self.held: list[object] = []
        self.tables = {served: [self._tables(rank, served) for _ in range(WEIGHTS)] for rank, served in RANKS.items()}
        wide = next_power_of_2(inputs)
        self.shapes = [
            (block, warps)
            for block, warps in dict.fromkeys((*SHAPES, *WIDE))
            if all(size % block == 0 for size in sizes) and 32 <= block * wide // (32 * warps) <= MOST_WEIGHTS
        ]

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02

    def _tables(self, rank: int, served: int) -> DecodeTables:
        slots = Slots(1, len(self.sizes), self.x.device, blocked=False)
        pairs = [LoraPair(self.draw(rank, self.x.shape[1]), self.draw(size, rank), 0.5) for size in self.sizes]
        slots.put(0, *table_entries(pairs))
        step = StepTiles(DECODE_ROWS[0], 1, served // RANK_BLOCK, 1, self.x.device)
        step.load(cut(Segments((0, 1), (0,)), (rank,), DECODE_ROWS[0]))
        self.held += [slots, step]
        return DecodeTables(step.tiles, slots.table(0, len(self.sizes)), served)

    def run(self, served: int | None, shape: Shape | None, weights: int = WEIGHTS) -> None:
        """`served`: rank of the graph, None: the base alone. Without a `shape` only x is made."""
        for place in range(weights):
            torch.mul(self.given, 2, out=self.x)
            if shape is not None:
                tables = None if served is None else self.tables[served][place]
                gemv(self.x[0], self.weights[place], None, self.sizes, tables, shape=shape)

    def rows(self) -> list[dict[str, Any]]:
        cases = [(served, shape) for served in (None, *RANKS.values()) for shape in self.shapes]
        with ProcessPoolExecutor(8, get_context("fork")) as pool, compile_only(pool):
            for served, shape in cases:
                self.run(served, shape, 1)
        torch.cuda.synchronize()
        ahead = self._us(None, None)
        return [
            {"R": served, "shape": shape, "us": round(self._us(served, shape) - ahead, 2)} for served, shape in cases
        ]

    def _us(self, served: int | None, shape: Shape | None) -> float:
        self.run(served, shape, 1)
        return graph_ms(lambda: self.run(served, shape)) * 1e3 / WEIGHTS


def measure(sites: Sequence[Sites], tp: int) -> list[dict[str, Any]]:
    return [
        {"tp": tp, "inputs": inputs, "outputs": sizes, **row}
        for inputs, sizes in sites
        for row in Case(inputs, sizes).rows()
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tp", default="1,2", help="numbers of GPUs whose sites to measure, on one GPU")
    options = parser.parse_args()
    torch.manual_seed(0)
    about = gpu_run("benchmarks.gemv_shapes", "", options.commit, {}) | {"command": command("benchmarks.gemv_shapes")}
    rows = [row for tp in options.tp.split(",") for row in measure(sites_of(int(tp)), int(tp))]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gemv_shapes.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
