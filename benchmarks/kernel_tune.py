"""Block sizes of the segmented kernels, by measurement: `python -m benchmarks.kernel_tune decode|long`."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable

import torch
from triton.runtime.errors import OutOfResources

from benchmarks import lora_cases as cases
from benchmarks.timing import graph_us
from coserve.kernels import segmented, segmented_launch as launch
from coserve.kernels.segmented_launch import DecodeBlocks, LongBlocks
from coserve.kernels.tables import HostTiles, cut, uncovered, upload


def decode(layers: int = 32) -> None:
    """The LoRA part of a Llama-3.1-8B decode step, ms; 32 distinct adapters and one."""
    sets = [cases.make_layer(group, 64, [16] * 32) for _ in range(layers) for group in cases.LLAMA]
    slots, firsts = cases.fill_slots(sets, 32)
    for name, owner, rows in (("a32", [i // 2 for i in range(64)], 8), ("a1", [0] * 64, 16), ("a1", [0] * 64, 32)):
        host = cut(cases.batch(owner, 1), [16] * 32, rows)
        tiles = upload(host, rows, cases.DEVICE)

        def step(blocks: DecodeBlocks) -> float:
            def call() -> None:
                for layer, first in zip(sets, firsts, strict=True):
                    table = slots.table(first, len(layer.ys))
                    where = (table.addresses, table.ranks)
                    h = launch.decode_shrink(layer.x, tiles.items, *where, rows, 16, blocks)
                    launch.decode_expand(layer.ys, h, tiles.tiles, *where, table.scalings, rows, blocks)

            return graph_us([call]).us / 1e3

        best = DecodeBlocks()
        results = {}

        def attempt(**change: object) -> None:
            nonlocal best
            blocks = DecodeBlocks(**{**best.__dict__, **change})
            if blocks in results:
                return
            try:
                results[blocks] = step(blocks)
            except (OutOfResources, RuntimeError) as error:
                print(name, rows, change, str(error)[:80])
                return
            print(f"{name} rows {rows} {results[blocks]:.4f} ms {change}", flush=True)
            best = min(results, key=results.__getitem__)

        attempt()
        attempt(fetch=False)
        attempt(pdl=False)
        for o, warps, blocks, stages in itertools.product((128, 256, 512), (2, 4, 8), (1, 2, 4), (2,)):
            if 8192 <= o * blocks * 32 <= 32768:
                attempt(o=o, expand_warps=warps, blocks=blocks, expand_stages=stages)
        for k, steps, warps in itertools.product((256, 512), (1, 2, 4), (2, 4)):
            attempt(k=k, steps=steps, shrink_warps=warps)
        attempt(fetch=False)
        attempt(pdl=False)
        print(f"BEST {name} rows {rows}: {results[best]:.4f} ms {best}", flush=True)


def long() -> None:
    """Prefill and training kernels one by one, µs, 4096 tokens over 8 adapters, at two ranks."""
    for rank in (16, 64):
        for group in (cases.LLAMA[0], cases.LLAMA[3]):
            layer = cases.make_layer(group, 4096, [rank] * 8)
            segments = cases.batch(list(range(8)), 512)
            table = segmented.group_of(segments, layer.pairs, cases.DEVICE).table
            for rows in (64, 128) if rank == 16 else (64,):
                _long_kernels(f"{group.name} r{rank} rows {rows}", layer, segments, table, rank, rows)
            del layer
            torch.cuda.empty_cache()


def _long_kernels(name: str, layer: cases.Layer, segments: cases.Segments, table, rank: int, rows: int) -> None:
    host = cut(segments, [rank] * 8, rows)
    tiles = upload(HostTiles([*host.tiles, *uncovered(segments, host, rows)], [], host.spans), rows, cases.DEVICE)
    where = (table.addresses, table.ranks)
    more = (*where, table.scalings)
    x, y = layer.x, layer.ys[0]
    h = torch.randn(len(layer.ys), 4096, rank, device=cases.DEVICE, dtype=cases.DTYPE)
    kernels: dict[str, tuple[Callable[[LongBlocks], object], int, list[dict[str, int]]]] = {
        "shrink": (
            lambda b: launch.long_shrink(x, tiles.tiles, *where, rows, rank, b),
            x.nbytes,
            [dict(k=k, shrink_warps=w, shrink_stages=s) for k in (64, 128) for w in (4, 8) for s in (3, 4)],
        ),
        "expand": (
            lambda b: launch.long_expand(y, y, h[0], tiles.tiles, *more, rows, b),
            2 * y.nbytes,
            [dict(o=o, blocks=n, expand_warps=w) for o in (64, 128, 256) for n in (1, 2) for w in (4, 8)],
        ),
        "shrink_b": (
            lambda b: launch.shrink_b(layer.ys[:1], tiles.tiles, *more, rows, rank, b),
            y.nbytes,
            [dict(k=k, shrink_warps=w, shrink_stages=s) for k in (64, 128) for w in (4, 8) for s in (3, 4)],
        ),
        "expand_a": (
            lambda b: launch.expand_a(h, x.shape[1], tiles.tiles, *where, rows, b),
            x.nbytes,
            [dict(o=o, expand_warps=w) for o in (64, 128, 256) for w in (4, 8)],
        ),
        "outer_a": (
            lambda b: launch.outer(
                x,
                h,
                [8 * rank] * len(layer.ys),
                tiles.tiles,
                tiles.spans,
                table.ranks,
                table.scalings,
                table.starts,
                rows,
                of_b=False,
                blocks=b,
            ),
            x.nbytes,
            [dict(outer_n=n, outer_warps=w, outer_stages=s) for n in (64, 128) for w in (4, 8) for s in (3,)],
        ),
    }
    for kernel, (call, size, changes) in kernels.items():
        results = {}
        for change in changes:
            blocks = LongBlocks(**change)
            try:
                results[tuple(change.items())] = graph_us([lambda blocks=blocks: call(blocks)], replays=7, repeat=4).us
            except (OutOfResources, RuntimeError) as error:
                print(name, kernel, change, str(error)[:60])
        ranked = sorted(results.items(), key=lambda item: item[1])
        floor = size / 4.3e6
        top = "; ".join(f"{us:.1f} {dict(change)}" for change, us in ranked[:3])
        print(f"{name} {kernel}: floor {floor:.1f} us | {top} | worst {ranked[-1][1]:.1f}", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    begun = time.perf_counter()
    {"decode": decode, "long": long}[sys.argv[1]]()
    print(f"{time.perf_counter() - begun:.0f} s")
