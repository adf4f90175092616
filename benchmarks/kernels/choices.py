"""Measurements for kernel choices: the tiles of a step with prompts, and LoRA terms after or overlapping a base
product.

    python -m benchmarks.kernels.choices --out benchmarks/results [--only tiles,beside]

`tiles`: the LoRA part of a layer in a graph, for mixes of prompts and decodes, by the long kernels (tiles of 64 rows)
and by the decode kernels (8 and 16 rows), each with capacity for exactly the batch and with 32 tiles more. What follows
from it is `generate.execution.graph_sizes.DECODE_KERNEL_TOKENS`. `beside`: a layer's products with the LoRA terms of 16
to 64 rows, the shrink after the product (`behind`) or overlapping it (`beside`). Llama-3.1-8B's sites and GPT-2
medium's without c_fc; adapters of random bf16.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.common.options import make_parser
from benchmarks.common.results import Results
from benchmarks.common.timing import Timing, graph_us
from benchmarks.kernels import lora_cases as cases
from coserve.kernels.gemm import skinny
from coserve.kernels.lora.segmented.adapter_table import RANK_BLOCK, SiteTable
from coserve.kernels.lora.segmented.plan import TilePlan
from coserve.kernels.lora.segmented.terms import add_
from coserve.kernels.lora.segmented.tiles import HostTiles, StepTiles, cut
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import FrozenWeight

ADAPTERS = 32
TOKENS = (32, 64, 128, 256, 512, 1024, 2048)
MOST_LOW = 160
"""Tiles up to which low ones are tried."""
GPT2 = tuple(group for group in cases.GPT2_MEDIUM if group.name != "c_fc")


@dataclass(frozen=True)
class Model:
    name: str
    groups: Sequence[cases.SiteGroup]
    layers: int
    """As many as it takes to be larger than the cache."""
    ranks: Sequence[int]


MODELS = (
    Model("llama.r16", cases.LLAMA, 4, (16,)),
    Model("llama.r8-64", cases.LLAMA, 4, (8, 16, 32, 64)),
    Model("gpt2.r16-128", GPT2, 12, (64, 16, 128, 32)),
)


@dataclass(frozen=True)
class Stack:
    """Some layers of a model, and its adapters in a slot table."""

    sets: list[cases.Layer]
    tables: list[SiteTable]
    ranks: list[int]
    layers: int

    @property
    def R(self) -> int:  # noqa: N802 - the letter of the kernels
        return -(-max(self.ranks) // RANK_BLOCK) * RANK_BLOCK


def make_stack(model: Model, rows: int, adapters: int) -> Stack:
    ranks = [model.ranks[index % len(model.ranks)] for index in range(adapters)]
    sets = [cases.make_layer(group, rows, ranks) for _ in range(model.layers) for group in model.groups]
    slots, firsts = cases.fill_slots(sets, adapters)
    tables = [slots.table(first, len(layer.ys)) for layer, first in zip(sets, firsts, strict=True)]
    return Stack(sets, tables, ranks, model.layers)


def mixes(tokens: int) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """(adapter, tokens) of each sequence in a step."""
    drawn = random.Random(0)
    yield "prompts16", sorted((drawn.randrange(14), tokens // 16) for _ in range(16))
    if tokens >= 128:
        yield "chunk.decodes32", [(index, 1 if index else tokens - 31) for index in range(32)]
    if tokens >= 256:
        yield "chunks4.decodes60", sorted((i % 32, (tokens - 60) // 4 if i < 4 else 1) for i in range(64))
    yield "one", [(0, tokens)]


def segments_of(sequences: Sequence[tuple[int, int]]) -> Segments:
    """Those of one adapter side by side."""
    bounds, adapters = [0], list[int]()
    for adapter, tokens in sequences:
        bounds.append(bounds[-1] + tokens)
        adapters.append(adapter)
    return Segments(tuple(bounds), tuple(adapters))


def terms(stack: Stack, segments: Segments, rows: int, spare: int, *, decode: bool) -> Timing:
    """Time of one layer, with at least `spare` tiles more than the batch needs."""
    host = cut(segments, stack.ranks, rows)
    tiles = max(len(host.tiles), -(-segments.tokens // rows) + spare)
    blocks = stack.R // RANK_BLOCK if decode else 0
    idle = [] if decode else [(0, 0, -1, 0)] * (tiles - len(host.tiles))
    static = StepTiles(rows, tiles, tiles * blocks, segments.tokens, cases.DEVICE)
    static.load(HostTiles([*host.tiles, *idle], host.items if decode else [], host.spans))
    plan = TilePlan(static.tiles, stack.R, decode)

    def call() -> None:
        for layer, table in zip(stack.sets, stack.tables, strict=True):
            add_(layer.ys, layer.x, plan, table)

    return a_layer(call, stack.layers)


def a_layer(call: Callable[[], object], layers: int) -> Timing:
    timing = graph_us([call], replays=9)
    return Timing(timing.us / layers, timing.low / layers, timing.high / layers)


def tiles_part(results: Results) -> None:
    for model in MODELS:
        for tokens in TOKENS:
            stack = make_stack(model, tokens, ADAPTERS)
            for name, sequences in mixes(tokens):
                segments = segments_of(sequences)
                for rows, spare in ((64, 0), (64, 32), (16, 0), (8, 0), (8, 32)):
                    count = len(cut(segments, stack.ranks, rows).tiles)
                    if rows < 64 and count > MOST_LOW:
                        continue
                    timing = terms(stack, segments, rows, spare, decode=rows < 64)
                    key = f"tiles.{model.name}.t{tokens}.{name}.rows{rows}" + (f".room{spare}" if spare else "")
                    put(results, key, timing, {"tiles": count})


def beside_part(results: Results) -> None:
    """Each x is made by a small kernel ahead of its product, as in a model."""
    for rows, adapters in ((64, 32), (64, 1), (32, 32), (16, 16)):
        stack = make_stack(MODELS[0], rows, adapters)
        weights = [
            torch.randn(sum(y.shape[1] for y in layer.ys), layer.x.shape[1], device=cases.DEVICE, dtype=cases.DTYPE)
            for layer in stack.sets
        ]
        counters = skinny.make_counters(max(len(weight) for weight in weights), cases.DEVICE)
        shapes = dict[torch.Size, skinny.Shape | None]()
        for weight in weights[: len(MODELS[0].groups)]:
            alike = [FrozenWeight(w, None, (len(w),)) for w in weights if w.shape == weight.shape]
            best, lost_us = skinny.fastest(alike, counters, rows)
            shapes[weight.shape] = best if lost_us < 0 else None
        tile = 16 if adapters == 1 else 8
        host = cut(cases.batch(sorted(i % adapters for i in range(rows)), 1), stack.ranks, tile)
        static = StepTiles(tile, len(host.tiles), len(host.items), rows, cases.DEVICE)
        static.load(host)
        plan = TilePlan(static.tiles, stack.R, True)

        def run(how: str) -> Callable[[], None]:
            def call() -> None:
                for layer, table, weight in zip(stack.sets, stack.tables, weights, strict=True):  # noqa: B023
                    layer.x.mul_(1.0)
                    shape, workspace = shapes[weight.shape], None  # noqa: B023
                    if shape is None:
                        y = torch.nn.functional.linear(layer.x, weight)
                    else:
                        y, workspace = skinny.skinny_gemm(layer.x, weight, None, counters, shape)  # noqa: B023
                    if how != "base":
                        ys = list(torch.split(y, [out.shape[1] for out in layer.ys], 1))
                        early = how == "beside" and workspace is not None
                        add_(ys, layer.x, plan, table, overlapped=early)  # noqa: B023

            return call

        ours = {f"{inputs}->{outputs}": shape is not None for (outputs, inputs), shape in shapes.items()}
        for how in ("base", "behind", "beside"):
            put(results, f"beside.rows{rows}.a{adapters}.{how}", a_layer(run(how), stack.layers), {"own_product": ours})


def put(results: Results, key: str, timing: Timing, about: dict[str, object]) -> None:
    results.put(key, round(timing.us, 2), "us a layer", None, (timing.low, timing.us, timing.high), about)


PARTS = {"tiles": tiles_part, "beside": beside_part}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", default=",".join(PARTS))
    given = parser.parse_args()
    if unknown := set(given.only.split(",")) - set(PARTS):
        parser.error(f"--only: expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    results = Results.of(given, "kernel_choices.json", __file__, {"adapters": ADAPTERS, "tokens": TOKENS})
    torch.manual_seed(0)
    for part in given.only.split(","):
        PARTS[part](results)


if __name__ == "__main__":
    main()
