"""Few rows through linear sites with LoRA terms: the base's product alone, with two launches more, and in one.

    python -m benchmarks.kernels.few_rows --out benchmarks/results [--rows 1,16,64] [--ranks 77,16,128]

Shapes of one of four GPUs, Llama-3.1-8B, one adapter for all rows. A graph of 32 products over weights larger than L2,
a small kernel ahead of each; microseconds of one. Each variant's output is compared with fp32. Random bf16.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.common.options import make_parser
from benchmarks.common.results import Results
from coserve.kernels.gemm import gemv, skinny
from coserve.kernels.gpu.launcher import compile_only
from coserve.kernels.gpu.rounding import next_power_of_2
from coserve.kernels.gpu.timing import graph_ms
from coserve.kernels.lora.segmented import launch_decode
from coserve.kernels.lora.segmented.adapter_table import RANK_BLOCK
from coserve.kernels.lora.segmented.launch_row import MOST_RANK, RowShape, linear_row
from coserve.kernels.lora.segmented.plan import GroupTable, TilePlan, plan_of, tables_of
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.shrinks import Shrinks
from coserve.kernels.lora.types import LoraPair

SITES: dict[str, tuple[int, tuple[int, ...]]] = {
    "q,k,v": (4096, (1024, 256, 256)),
    "o": (1024, (4096,)),
    "gate,up": (4096, (3584, 3584)),
    "down": (3584, (4096,)),
}
Product = Callable[[int, Tensor], tuple[Tensor, tuple[Tensor, ...] | None]]
"""Of call `i`; with the workspace, where the next kernel may start early."""
CALLS, COPIES = 32, 8
WITH = 6
"""Products that are measured with LoRA terms, the fastest ones."""
OTHER_SHAPES = tuple(
    skinny.Shape(*each)
    for each in (
        (64, 128, 4, 4, 6),
        (64, 128, 7, 4, 6),
        (64, 128, 8, 4, 6),
        (64, 64, 4, 4, 8),
        (64, 256, 2, 4, 3),
        (128, 128, 2, 8, 4),
        (128, 128, 4, 8, 4),
        (128, 64, 2, 8, 6),
        (128, 64, 4, 8, 6),
    )
)
"""Shapes of the skinny GEMM that are tried besides `skinny.SHAPES`."""
DEVICE = torch.device("cuda")


class Variant(NamedTuple):
    name: str
    run: Callable[[int, Tensor], Tensor]
    """Of call `i`."""


@dataclass
class Case:
    """One group of sites, its weights and adapters, for one number of rows."""

    inputs: int
    sizes: tuple[int, ...]
    rows: int
    rank: int

    def __post_init__(self) -> None:
        drawn = partial(torch.randn, device=DEVICE, dtype=torch.bfloat16)
        self.x = drawn(self.rows, self.inputs)
        self.w = [drawn(sum(self.sizes), self.inputs) * self.inputs**-0.5 for _ in range(COPIES)]
        self.pairs = [self._pairs(drawn) for _ in range(COPIES)]
        self.tables: list[GroupTable] = tables_of(self.pairs, DEVICE)
        segments = Segments((0, self.rows), (0,))
        plan = plan_of(segments, self.tables[0].ranks, DEVICE, train=False)
        served = next(most for most in (16, 32, 64, 128, 256) if most >= self.rank)  # the graphs' largest rank
        tiles = plan.tiles
        idle = len(tiles.tiles) * (served - plan.R) // RANK_BLOCK
        items = torch.cat((tiles.items, tiles.items.new_zeros(idle, 4)))
        self.plan: TilePlan = replace(plan, R=served, tiles=replace(tiles, items=items))
        self.counters = skinny.make_counters(sum(self.sizes), DEVICE)
        self.shrinks = Shrinks(DEVICE)

    def _pairs(self, drawn: Callable[..., Tensor]) -> list[list[LoraPair | None]]:
        a = [drawn(self.rank, self.inputs) * self.inputs**-0.5 for _ in self.sizes]
        b = [drawn(size, self.rank) * self.rank**-0.5 for size in self.sizes]
        return [[LoraPair(one, two, 2.0)] for one, two in zip(a, b, strict=True)]

    def right(self) -> Tensor:
        """Call 0 in fp32."""
        x = self.x.float()
        terms = [2.0 * (x @ own.a_RD.float().T) @ own.b_OR.float().T for (own,) in self.pairs[0] if own is not None]
        found: Tensor = x @ self.w[0].float().T + torch.cat(terms, 1)
        return found

    def products(self) -> Iterator[tuple[str, Product]]:
        """The base alone."""
        yield "torch", lambda i, x: (functional.linear(x, self.w[i % COPIES]), None)
        if self.rows == 1:
            for one in gemv.shapes_of(self.inputs):
                yield f"gemv{one}", partial(self._gemv, one)
        for own in self.shapes():
            yield f"skinny{_short(own)}", partial(self._skinny, own)

    def _gemv(self, shape: gemv.Shape, i: int, x: Tensor) -> tuple[Tensor, None]:
        return gemv.gemv(x[0], self.w[i % COPIES], None, shape)[None], None

    def shapes(self) -> list[skinny.Shape]:
        """Of the skinny GEMM."""
        most = skinny.rows_of(self.rows)
        assert most is not None, "expected few rows"
        found = skinny.shapes_of(self.inputs, sum(self.sizes), torch.bfloat16, most)
        others = OTHER_SHAPES if self.rows > 16 else ()
        return found + [shape for shape in others if self.inputs % (shape.splits * shape.k) == 0]

    def _skinny(self, shape: skinny.Shape, i: int, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return skinny.skinny_gemm(x, self.w[i % COPIES], None, self.counters, shape)

    def after(self, product: Product, i: int, x: Tensor) -> Tensor:
        """Shrink, beside the product if that allows it, and expand."""
        y, workspace = product(i, x)
        ys = torch.split(y, list(self.sizes), 1)
        launch_decode.decode(ys, x, self.plan, self.tables[i % COPIES].table, overlapped=workspace is not None)
        return y

    def in_one(self) -> Iterator[Variant]:
        if self.rows > 1 or self.plan.R > MOST_RANK:
            return
        for n, h, warps in itertools.product((1, 2, 4, 8, 16), (1, 2, 4), (4, 8)):
            if 32 <= n * next_power_of_2(self.inputs) // (64 * warps) <= 64 and h * self.inputs <= 4096 * warps:
                yield Variant(f"row{(n, h, warps)}", partial(self.row, RowShape(n, h, warps)))

    def row(self, shape: RowShape, i: int, x: Tensor) -> Tensor:
        table = self.tables[i % COPIES].table
        return linear_row(x[0], self.w[i % COPIES], None, self.sizes, self.shrinks, self.plan, table, shape)[None]

    def us(self, run: Callable[[int, Tensor], object]) -> float:
        """Of one call in a graph of 32."""
        made = torch.empty_like(self.x)

        def calls() -> None:
            self.shrinks.begin()
            for i in range(CALLS):
                torch.mul(self.x, 1.0, out=made)
                run(i, made)

        calls()
        return median(graph_ms(calls) for _ in range(2)) * 1e3 / CALLS

    def error(self, run: Callable[[int, Tensor], Tensor]) -> float:
        self.shrinks.begin()
        right = self.right()
        return float((run(0, self.x).float() - right).norm() / right.norm())


def _short(shape: skinny.Shape) -> tuple[int, ...]:
    return shape.n, shape.k, shape.splits, shape.warps, shape.stages


def measure(case: Case) -> dict[str, object]:
    """Microseconds by variant."""
    base, found, wrong = dict[str, float](), dict[str, float](), dict[str, float]()

    def add(name: str, run: Callable[[int, Tensor], Tensor]) -> None:
        try:
            error = case.error(run)
            if not error < 2e-2:
                wrong[name] = error
            found[name] = round(case.us(run), 3)
        except Exception as problem:  # noqa: BLE001 - shapes too large for the device
            wrong[name] = -1.0
            print(name, str(problem)[:200], flush=True)

    def alone(product: Product, i: int, x: Tensor) -> Tensor:
        return product(i, x)[0]

    products = dict(case.products())
    for name, product in products.items():
        try:
            base[name] = round(case.us(partial(alone, product)), 3)
        except Exception as problem:  # noqa: BLE001 - shapes too large for the device
            print(name, str(problem)[:200], flush=True)
    ranked = sorted(base, key=lambda name: base[name])
    skinny_ranked = [name for name in ranked if name.startswith("skinny")]
    for name in dict.fromkeys([ranked[0], *skinny_ranked[:WITH], "torch"]):
        add(f"two.{name}", partial(case.after, products[name]))
    for variant in case.in_one():
        add(variant.name, variant.run)
    fastest = {
        kind: min(((value, name) for name, value in found.items() if name.startswith(kind)), default=None)
        for kind in ("two", "row")
    }
    return {
        "base": base,
        "with": found,
        "wrong": wrong,
        "fastest": fastest,
        "fastest_base": (base[ranked[0]], ranked[0]),
    }


def compile_all(case: Case) -> None:
    """Inside `compile_only`."""
    for _, product in case.products():
        product(0, case.x)
    for name, product in case.products():
        if name == "torch" or name.startswith("skinny"):
            case.after(product, 0, case.x)
    for variant in case.in_one():
        variant.run(0, case.x)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", default="1,64,16")
    parser.add_argument("--ranks", default="77,16,128")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no case is begun")
    options = parser.parse_args()
    began = time.monotonic()
    kinds = [
        (name, rows, rank)
        for rank in map(int, options.ranks.split(","))
        for rows in map(int, options.rows.split(","))
        for name in SITES
    ]
    results = Results.of(
        options,
        "few_rows.json",
        script="benchmarks.kernels.few_rows",
        hardware=torch.cuda.get_device_name(),
        seed=0,
        settings={"copies": COPIES},
    )
    with ProcessPoolExecutor(14, get_context("fork")) as pool:
        pool.submit(int).result()
        for rank in dict.fromkeys(rank for _, _, rank in kinds):
            left = [kind for kind in kinds if kind[2] == rank]
            if time.monotonic() - began > options.budget:
                print("no time was left for", left, flush=True)
                continue
            with compile_only(pool):
                for name, rows, _ in left:
                    compile_all(Case(*SITES[name], rows, rank))
            print(f"rank {rank}: compiled after {time.monotonic() - began:.1f} s", flush=True)
            for name, rows, _ in left:
                if time.monotonic() - began > options.budget:
                    print("no time was left for", name, rows, rank, flush=True)
                    continue
                found = measure(Case(*SITES[name], rows, rank))
                print(name, rows, rank, found["fastest_base"], found["fastest"], found["wrong"], flush=True)
                results.put(f"few_rows.{name}.b{rows}.r{rank}", 0.0, "us", None, [], found)


if __name__ == "__main__":
    main()
