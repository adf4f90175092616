"""Block sizes of the segmented kernels, by measurement: `python -m benchmarks.kernels.tune decode`, `wide` or
`long [kernel,...]`.

One setting is varied at a time from the best so far. The winners are in `lora/segmented/block_sizes.py`:
`decode_blocks` and `PREFILL_BLOCKS`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.common.timing import graph_us
from benchmarks.kernels import lora_cases as cases
from coserve.kernels.lora.segmented import block_sizes, launch_backward, launch_decode, launch_prefill
from coserve.kernels.lora.segmented.adapter_table import SiteTable
from coserve.kernels.lora.segmented.block_sizes import DecodeBlocks, PrefillBlocks
from coserve.kernels.lora.segmented.plan import TilePlan, tables_of
from coserve.kernels.lora.segmented.tiles import HostTiles, Tiles, base_only_tiles, cut, upload

Change = dict[str, int | bool]
Blocks = TypeVar("Blocks", DecodeBlocks, PrefillBlocks)
LongCall = Callable[[cases.Layer, SiteTable, torch.Tensor, TilePlan], object]


def climb(name: str, start: Blocks, changes: Iterable[Change], time_us: Callable[[Blocks], float]) -> None:
    """Tries each change on top of the best so far; prints every result and the winner."""
    best, times = start, dict[Blocks, float]()

    def attempt(blocks: Blocks) -> None:
        if blocks not in times:
            try:
                times[blocks] = time_us(blocks)
            except (OutOfResources, RuntimeError) as error:
                print(f"{name} failed {blocks}: {str(error)[:80]}", flush=True)

    attempt(start)
    for change in changes:
        attempt(replace(best, **change))  # type: ignore[arg-type]  # a change names fields of the blocks
        best = min(times, key=lambda blocks: times[blocks])
    for blocks, us in sorted(times.items(), key=lambda item: item[1])[:14]:
        print(f"{name} {us:10.2f} us {blocks}", flush=True)
    print(f"{name} {times[start]:10.2f} us at the start, worst {max(times.values()):.2f}", flush=True)


DECODE_CHANGES: tuple[Change, ...] = (
    *(
        {"k": k, "steps": steps, "shrink_warps": warps, "parts": warps}
        for k, steps, warps in ((512, 2, 4), (512, 1, 2), (1024, 1, 2), (1024, 1, 4), (1024, 2, 2), (2048, 1, 4))
    ),
    *({"o": o, "expand_warps": warps} for o, warps in ((64, 4), (128, 4), (128, 8), (256, 4), (256, 8), (512, 8))),
)
EXPAND_CHANGES: tuple[Change, ...] = tuple(
    {"r": r, "o": o, "expand_warps": warps}
    for r in (32, 64, 128)
    for o, warps in ((64, 4), (128, 4), (128, 8), (256, 4), (256, 8))
)


def climb_decode(name: str, changes: Iterable[Change], us: Callable[[DecodeBlocks | None], float]) -> None:
    """`climb`, and what `decode_blocks` chooses."""
    climb(name, DecodeBlocks(), (*DECODE_CHANGES, *changes), us)
    print(f"{name} {us(None):10.2f} us as decode_blocks chooses", flush=True)


def decode(layers: int = 32) -> None:
    """The LoRA part of a Llama-3.1-8B decode step: 64 tokens, 32 distinct adapters of rank 16, and one."""
    sets = [cases.make_layer(group, 64, [16] * 32) for _ in range(layers) for group in cases.LLAMA]
    slots, firsts = cases.fill_slots(sets, 32)
    tables = [slots.table(first, len(layer.ys)) for layer, first in zip(sets, firsts, strict=True)]

    def timed(tiles: Tiles) -> Callable[[DecodeBlocks | None], float]:
        def us(blocks: DecodeBlocks | None) -> float:
            def call() -> None:
                for layer, table in zip(sets, tables, strict=True):
                    launch_decode.decode(layer.ys, layer.x, TilePlan(tiles, 16, True), table, blocks=blocks)

            return graph_us([call], replays=9).us

        return us

    for name, owner, rows in (
        ("a32", [i // 2 for i in range(64)], 8),
        ("a1", [0] * 64, 8),
        ("a1", [0] * 64, 16),
        ("a1", [0] * 64, 32),
    ):
        tiles = upload(cut(cases.batch(owner, 1), [16] * 32, rows), rows, 64, cases.DEVICE)
        climb_decode(f"{name} rows {rows}", (), timed(tiles))


def wide() -> None:
    """The decode expand where ranks are large: figure 5.1's batch on GPT-2 medium, and mixed ranks on Llama-3.1-8B."""
    gpt2 = [group for group in cases.GPT2_MEDIUM if group.name != "c_fc"]
    uniform = [0, 0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    for name, groups, layers, ranks, R, owner in (
        ("gpt2 a14, ranks to 128", gpt2, 24, [(64, 16, 128, 32)[i % 4] for i in range(14)], 128, uniform),
        ("gpt2 a1, rank 64", gpt2, 24, [64], 64, [0] * 16),
        (
            "llama a32, ranks to 64",
            cases.LLAMA,
            32,
            [(8, 16, 32, 64)[i % 4] for i in range(32)],
            64,
            [i // 2 for i in range(64)],
        ),
        ("llama a1, rank 64", cases.LLAMA, 32, [64], 64, [0] * 64),
    ):
        sets = [cases.make_layer(group, len(owner), ranks) for _ in range(layers) for group in groups]
        slots, firsts = cases.fill_slots(sets, len(ranks))
        tables = [slots.table(first, len(layer.ys)) for layer, first in zip(sets, firsts, strict=True)]
        rows = 16 if len(ranks) == 1 else 8
        tiles = upload(cut(cases.batch(owner, 1), ranks, rows), rows, len(owner), cases.DEVICE)

        def us(
            blocks: DecodeBlocks | None,
            sets: list[cases.Layer] = sets,
            tables: list[SiteTable] = tables,
            tiles: Tiles = tiles,
            R: int = R,
        ) -> float:
            def call() -> None:
                for layer, table in zip(sets, tables, strict=True):
                    launch_decode.decode(layer.ys, layer.x, TilePlan(tiles, R, True), table, blocks=blocks)

            return graph_us([call], replays=9).us

        climb_decode(name, EXPAND_CHANGES, us)


def long() -> None:
    """Prefill and training kernels one by one: 4096 tokens over 8 adapters, inputs larger than the L2."""
    for rank in (16, 64):
        layers = [cases.make_layer(cases.LLAMA[2], 4096, [rank] * 8) for _ in range(2)]
        segments = cases.batch(list(range(8)), 512)
        tables = [tables_of([layer.pairs], cases.DEVICE)[0].table for layer in layers]
        for rows in (64,):
            host = cut(segments, [rank] * 8, rows)
            all_rows = HostTiles([*host.tiles, *base_only_tiles(segments, host, rows)], [], host.spans)
            tiles = upload(all_rows, rows, 4096, cases.DEVICE)
            _long_kernels(f"r{rank} rows {rows}", layers, tables, tiles, rank)


def _long_kernels(name: str, layers: list[cases.Layer], tables: list[SiteTable], tiles: Tiles, rank: int) -> None:
    h = [torch.randn(2, 4096, rank, device=cases.DEVICE, dtype=cases.DTYPE) for _ in layers]
    both = list(zip(layers, tables, h, strict=True))

    def timed(call: LongCall) -> Callable[[PrefillBlocks], float]:
        def microseconds(blocks: PrefillBlocks) -> float:
            plan = TilePlan(tiles, rank, False, blocks)
            return graph_us([partial(call, *inputs, plan) for inputs in both], replays=7, repeat=2).us

        return microseconds

    kernels: dict[str, tuple[LongCall, list[Change]]] = {
        "shrink": (
            lambda la, t, h, plan: launch_prefill.prefill_shrink(la.x, plan, t),
            [{"k": k, "shrink_stages": s, "shrink_programs": p} for p in (1, 2) for k in (64, 128) for s in (3, 6)],
        ),
        "expand": (
            lambda la, t, h, plan: launch_prefill.prefill_expand(la.ys, la.ys, h, plan, t),
            [{"o": o, "run_stages": s, "run_blocks": n} for o in (32, 64) for s in (2, 3, 4) for n in (1, 4, 8)],
        ),
        "shrink_b": (
            lambda la, t, h, plan: launch_backward.shrink_b(la.ys, plan, t),
            [{"k": k, "back_warps": w, "back_stages": s} for k in (64, 128) for w in (4, 8) for s in (3, 4)],
        ),
        "expand_a": (
            lambda la, t, h, plan: launch_backward.expand_a(h, 14336, plan, t),
            [{"d": d, "d_warps": w} for d in (64, 128, 256) for w in (2, 4, 8)],
        ),
        "outer_b": (
            lambda la, t, h, plan: launch_backward.outer(la.ys[0], h[:1], [8 * rank], plan, t, of_b=0),
            [{"outer_n": n, "outer_warps": w, "outer_stages": s} for n in (64, 128) for w in (4, 8) for s in (2, 3)],
        ),
    }
    for kernel, (call, changes) in kernels.items():
        if len(sys.argv) > 2 and kernel not in sys.argv[2].split(","):
            continue
        climb(f"{name} {kernel}", block_sizes.PREFILL_BLOCKS, changes, timed(call))


if __name__ == "__main__":
    torch.manual_seed(0)
    begun = time.perf_counter()
    {"decode": decode, "wide": wide, "long": long}[sys.argv[1]]()
    print(f"{time.perf_counter() - begun:.0f} s")
