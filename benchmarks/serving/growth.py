"""Cost of a decode step over 1 to 256 sequences and 128 to 32k tokens of context, with and without adapters.

    python -m benchmarks.serving.growth --out benchmarks/results [--budget 200] [--kv-cache-dtype fp8]
    TRITON_INTERPRET=1 python -m benchmarks.serving.growth --tiny --out /tmp/tried

Milliseconds from one step's tokens to the next step's, through the generator and its graphs. Prompts are not
prefilled: the cache claims to hold them (all but their last tokens) in pages of random numbers, which no two sequences
share, so a step reads as many pages as usual. Prefilling 16 x 32k tokens would take minutes. `of_floor`: the time to
read the weights and the keys and values once, at `--bandwidth`, over the measured one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from benchmarks.common.options import make_parser
from benchmarks.common.results import Results
from benchmarks.common.timing import synchronize
from benchmarks.serving.case import FULL, SEED, TINY, Bench, Load, Shape, make_base
from coserve.memory.buffer import cache_dtype
from coserve.memory.kv import KvCache

SEQUENCES = (1, 4, 16, 64, 256)
CONTEXTS = (128, 1024, 4096, 16384, 32768)
WARM, STEPS = 6, 32
PAGE_TOKENS = 16
ONE = 0x38
"""1.0 as e4m3; smaller bytes are numbers from 0 to 1."""
BIG = replace(FULL, context=CONTEXTS[-1] + 1024, kv_tokens=600_000)
SMALL = replace(TINY, context=256)
Cell = tuple[int, int, int]
"""Sequences, context, adapters."""


class FullCache(KvCache):
    """Claims to hold any prefix."""

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Unshared pages, with the content that `fill` wrote."""
        return self.allocate(sum(1 for _ in keys)) or []

    def label(self, page: int, key: bytes) -> None:
        """Nothing to do: `find` needs no labels."""

    def fill(self, dtype: torch.dtype) -> None:
        """Random keys and values in all pages but the last, which stays zero."""
        numbers = self.buffer.bytes[:-1]
        if dtype == torch.float8_e4m3fn:
            numbers.random_(0, ONE)
        else:
            numbers.view(dtype).normal_()


def cells(shape: Shape, adapters: Iterable[int]) -> tuple[list[Cell], list[Cell]]:
    """Cells that fit into the pool, cheapest first, and cells that do not."""
    every = [(n, c, a) for n in SEQUENCES for c in CONTEXTS for a in adapters]
    every = [cell for cell in every if cell[0] <= shape.max_running and cell[1] + 64 <= shape.context]
    reserved = 3 * shape.kv_tokens // 100  # for the adapters
    fits = [cell for cell in every if cell[0] * (cell[1] + WARM + STEPS + 32) <= shape.kv_tokens - reserved]
    return sorted(fits, key=lambda cell: cell[0] * cell[1]), [cell for cell in every if cell not in fits]


def step_ms(bench: Bench, cell: Cell) -> list[float]:
    """Of `STEPS` decode steps, the last of which has the cell's context."""
    sequences, context, adapters = cell
    load = Load(sequences, context - WARM - STEPS, WARM + STEPS + 8, adapters)
    name = f"growth/{cell}"
    for one in load.make_requests(name, bench.shape.vocab):
        bench.generator.add(one)
    times = list[float]()
    for step in range(WARM + STEPS + 1):
        began = time.perf_counter()
        told = len(bench.generator.step())
        times.append((time.perf_counter() - began) * 1e3)
        assert step == 0 or told == sequences, f"expected a token of each of {sequences} sequences, got {told}"
    bench.generator.collect()
    for i in range(sequences):
        bench.generator.cancel(f"{name}/{i}")
    synchronize(bench.shape.device)
    return times[WARM + 1 :]


def floor_ms(bench: Bench, cell: Cell, bandwidth: float) -> float:
    """Milliseconds to read the weights, but for the embedding, and the context once; without adapters."""
    embedding = bench.base.model.get_input_embeddings().weight
    weights: int = sum(one.nbytes for one in bench.base.model.parameters() if one is not embedding)
    return (weights + cell[0] * cell[1] * bench.kv.buffer.page_bytes / PAGE_TOKENS) / bandwidth * 1e3


def measure(bench: Bench, todo: Iterable[Cell], deadline: float) -> Iterator[tuple[Cell, list[float] | None]]:
    """None: no time was left."""
    for cell in todo:
        yield cell, None if time.monotonic() > deadline else step_ms(bench, cell)


def main() -> None:
    parser = make_parser(__doc__, tiny="a tiny shape on the CPU, to try the script")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds after which no cell is begun")
    parser.add_argument("--adapters", default="0,32", help="numbers of adapters, separated by commas")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8"))
    parser.add_argument("--bandwidth", type=float, default=4.8e12, help="bytes a second of the GPU's memory")
    options = parser.parse_args()
    began, shape = time.monotonic(), SMALL if options.tiny else BIG
    base = make_base(shape)
    pages = shape.kv_tokens // PAGE_TOKENS
    cached = cache_dtype(options.kv_cache_dtype, base.dtype, base.device)
    kv = FullCache(base.kv_shapes, pages=pages, page_tokens=PAGE_TOKENS, dtype=cached, device=base.device)
    kv.fill(cached)
    bench = Bench(base, shape, kv=kv, prefix_cache=True)
    adapters = [int(count) for count in options.adapters.split(",")]
    if any(adapters):
        bench.publish("a")
    print(f"compiled and captured in {bench.capture():.1f} s", flush=True)
    results = Results.of(
        options,
        "serving_growth.json",
        __file__,
        vars(shape) | {"warm": WARM, "steps": STEPS, "bandwidth": options.bandwidth},
        seed=SEED,
    )
    todo, too_large = cells(shape, adapters)
    if too_large:
        print(f"left out, as the pool of {shape.kv_tokens} tokens is too small:", *too_large, flush=True)
    for cell, found in measure(bench, todo, began + options.budget):
        sequences, context, count = cell
        kind = "" if options.kv_cache_dtype == "auto" else f"kv_{options.kv_cache_dtype}."
        key = f"serving.step_ms.{kind}b{sequences}.c{context}.a{count}"
        if found is None:
            print(f"no time was left for {key}", flush=True)
            continue
        median = statistics.median(found)
        about = {
            "sequences": sequences,
            "context": context,
            "adapters": count,
            "tok_s": round(sequences / median * 1e3),
            "of_floor": round(floor_ms(bench, cell, options.bandwidth) / median, 3),
        }
        results.put(key, round(median, 3), "ms a step", None, found, about)


if __name__ == "__main__":
    main()
