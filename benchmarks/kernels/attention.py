"""Paged attention on one GPU, one layer of Llama-3.1-8B: ours against other libraries; microseconds and share of the
floor.

    python -m benchmarks.kernels.attention --out benchmarks/results [--only decode,widths,prefill]
    python -m benchmarks.kernels.attention --tune --out DIR

Each part writes `attention_<part>.json`. Times are CUDA-graph replays over pages that together exceed the L2.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.common.options import add_names, make_parser
from benchmarks.common.provenance import gpu_run
from benchmarks.common.timing import graph_us
from benchmarks.kernels import attention_methods as methods
from coserve.kernels.attention.interface import TokenRun
from coserve.kernels.attention.triton_paged import launch as attention_launch
from coserve.kernels.attention.triton_paged import plan as attention_plan

BANDWIDTH = 4.30e12
"""Bytes a second of a device-to-device copy on the H200, read plus written."""
L2_BYTES = 60e6
BATCHES = (1, 8, 32, 64, 256)
CONTEXTS = (128, 512, 2048, 8192, 32768)
CACHE_TOKENS = 8 << 20
"""32 GiB of the shape's cache: batch 256 at 32768 tokens of context."""
SHAPE = methods.Shape()
WIDTHS = (methods.Shape(32, 8, 64), methods.Shape(32, 32, 80), methods.Shape(32, 32, 96), methods.Shape(16, 8, 256))
PREFILLS: dict[str, list[tuple[int, int]]] = {
    "8 x 512": [(0, 512)] * 8,
    "1 x 2048": [(0, 2048)],
    "1 x 8192": [(0, 8192)],
    "512 behind 1536": [(1536, 512)],
    "512 behind 7680": [(7680, 512)],
    "2048 behind 30720": [(30720, 2048)],
    "8 x 64 behind 960": [(960, 64)] * 8,
    "64 behind 30720": [(30720, 64)],
}
Row = dict[str, Any]
Make = Callable[[methods.Cache, list[TokenRun]], methods.Call]


def _time(make: Make, cache: methods.Cache, spans: list[tuple[int, int]], replays: int = 9) -> float:
    """Microseconds of one call over sets of pages that pass through the L2 twice over."""
    size = sum(position + tokens for position, tokens in spans) * cache.shape.bytes_per_token
    sets = max(1, min(16, int(2 * L2_BYTES / size) + 1))
    calls = [make(cache, cache.runs(spans)) for _ in range(sets)]
    us = graph_us(calls, replays=replays, repeat=max(1, 4 // sets)).us
    del calls
    gc.collect()
    torch.cuda.empty_cache()
    return round(us, 2)


def _columns(makes: dict[str, Make | None], cache: methods.Cache, spans: list[tuple[int, int]]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, make in makes.items():
        if make is None:
            continue
        try:
            columns[name] = _time(make, cache, spans)
        except Exception as error:  # noqa: BLE001 - the failure of a library is recorded
            columns[name] = f"{type(error).__name__}: {error}"[:200]
            torch.cuda.empty_cache()
    return columns


def decode_part(cache: methods.Cache) -> list[Row]:
    rows: list[Row] = []
    flashinfer = {
        "flashinfer": methods.flashinfer_decode_of(tensor_cores=True),
        "flashinfer_cuda_cores": methods.flashinfer_decode_of(tensor_cores=False),
    }
    for batch, context in product(BATCHES, CONTEXTS):
        size = batch * context * SHAPE.bytes_per_token
        makes: dict[str, Make | None] = {"ours": methods.static, **flashinfer}
        if size <= 2 << 30:
            makes |= {"sdpa_gathered": methods.sdpa, "sdpa_not_paged": _not_paged}
        if size <= 1 << 28:
            makes["plain"] = methods.plain
        columns = _columns(makes, cache, [(context - 1, 1)] * batch)
        floor = size / BANDWIDTH * 1e6
        row = {"batch": batch, "context": context, "floor_us": round(floor, 2), "us": columns}
        rows.append({**row, "of_floor": round(floor / columns["ours"], 3)})
        print(rows[-1], flush=True)
    uneven = [(100, 1)] * 63 + [(32767, 1)]
    columns = _columns({"ours": methods.static, "flashinfer": flashinfer["flashinfer"]}, cache, uneven)
    floor = sum(position + 1 for position, _ in uneven) * SHAPE.bytes_per_token / BANDWIDTH * 1e6
    rows.append({"case": "63 of 101 and 1 of 32768", "floor_us": round(floor, 2), "us": columns})
    print(rows[-1], flush=True)
    return rows


def widths_part(_: methods.Cache) -> list[Row]:
    """Other head sizes: decode, and chunks of prompts."""
    rows: list[Row] = []
    for shape in WIDTHS:
        cache, about = methods.Cache(shape, 1 << 18), asdict(shape)
        for batch, context in ((1, 512), (1, 2048), (32, 512), (32, 2048), (64, 2048)):
            spans = [(context - 1, 1)] * batch
            us = {"ours": _time(methods.static, cache, spans), "sdpa_not_paged": _time(_not_paged, cache, spans)}
            floor = batch * context * shape.bytes_per_token / BANDWIDTH * 1e6
            rows.append({"shape": about, "batch": batch, "context": context, "floor_us": round(floor, 2), "us": us})
            print(rows[-1], flush=True)
        for name in ("8 x 512", "1 x 8192", "512 behind 7680"):
            us = {
                "ours": _time(methods.mixed, cache, PREFILLS[name]),
                "varlen": _time(methods.varlen, cache, PREFILLS[name]),
            }
            rows.append({"shape": about, "case": name, "us": us, "tflops": _tflops(us, PREFILLS[name], shape)})
            print(rows[-1], flush=True)
        del cache
        torch.cuda.empty_cache()
    return rows


_not_paged = partial(methods.sdpa, gather=False)


def _tflops(us: dict[str, Any], spans: list[tuple[int, int]], shape: methods.Shape) -> dict[str, float]:
    pairs = sum(tokens * position + tokens * (tokens + 1) / 2 for position, tokens in spans)
    flop = 4 * shape.heads * shape.width * pairs
    return {method: round(flop / some / 1e6, 1) for method, some in us.items() if isinstance(some, float)}


def prefill_part(cache: methods.Cache) -> list[Row]:
    rows: list[Row] = []
    makes: dict[str, Make | None] = {
        "ours": methods.mixed,
        "varlen": methods.varlen,
        "fa3": methods.fa3_of(),
        "flashinfer_fa2": methods.flashinfer_prefill_of("fa2"),
        "flashinfer_fa3": methods.flashinfer_prefill_of("fa3"),
    }
    for name, spans in PREFILLS.items():
        columns = _columns(makes, cache, spans)
        rows.append({"case": name, "us": columns, "tflops": _tflops(columns, spans, SHAPE)})
        print(rows[-1], flush=True)
    return rows


def tune(cache: methods.Cache) -> list[Row]:
    """Block sizes, and how finely sequences are cut."""
    rows: list[Row] = []
    points = [(1, 128), (1, 512), (1, 2048), (1, 8192), (4, 512), (8, 512), (8, 2048), (16, 512), (16, 2048), (32, 300)]
    points += [(32, 2048), (48, 1024), (64, 512), (64, 2048), (256, 512)]
    default = attention_launch.decode_blocks, attention_launch.prefill_blocks

    def measure(tag: Row, replays: int = 5) -> None:
        us = {f"{b}x{c}": _time(methods.static, cache, [(c - 1, 1)] * b, replays) for b, c in points}
        rows.append({**tag, "us": us})
        print(rows[-1], flush=True)

    sizes = (128, 4, 3, True), (64, 4, 4, True), (64, 4, 3, True), (64, 2, 3, True), (32, 2, 4, True), (32, 2, 4, False)
    for keys, warps, stages, pdl in sizes:
        blocks = attention_launch.Blocks(16, keys, warps, stages, pdl)
        attention_launch.decode_blocks = lambda *_, blocks=blocks: blocks
        measure({"decode": asdict(blocks)})
    attention_launch.decode_blocks = default[0]
    costs = attention_plan.START, attention_plan.JOIN, attention_plan.JOINED
    for some in (costs, (64, 128, 4), (256, 128, 4), (128, 64, 4), (128, 256, 4), (128, 128, 8), (128, 128, 16)):
        attention_plan.START, attention_plan.JOIN, attention_plan.JOINED = some
        measure({"start, join, joined": some})
    attention_plan.START, attention_plan.JOIN, attention_plan.JOINED = costs
    tiles = (256, 64, 8, 3), (128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 4), (64, 32, 4, 3)
    for rows_, keys, warps, stages in tiles:
        blocks = attention_launch.Blocks(rows_, keys, warps, stages)
        attention_launch.prefill_blocks = lambda *_, blocks=blocks: blocks
        try:
            us: dict[str, float | str] = {
                name: _time(methods.mixed, cache, spans, 5) for name, spans in PREFILLS.items()
            }
        except Exception as error:  # noqa: BLE001 - recorded
            us = {"error": str(error)[:100]}
        rows.append({"prefill": asdict(blocks), "us": us})
        print(rows[-1], flush=True)
    attention_launch.prefill_blocks = default[1]
    return rows


PARTS: dict[str, Callable[[methods.Cache], list[Row]]] = {
    "decode": decode_part,
    "widths": widths_part,
    "prefill": prefill_part,
}


def main() -> None:
    parser = make_parser(__doc__)
    add_names(parser, "--only", PARTS)
    parser.add_argument("--tune", action="store_true", help="block sizes instead")
    args = parser.parse_args()
    torch.manual_seed(0)
    args.out.mkdir(parents=True, exist_ok=True)
    cache = methods.Cache(SHAPE, CACHE_TOKENS)
    parts = {"tune": tune} if args.tune else {name: PARTS[name] for name in args.only}
    for name, part in parts.items():
        begin = time.monotonic()
        rows = part(cache)
        seconds = {"seconds": round(time.monotonic() - begin, 1)}
        others = {"flashinfer": getattr(sys.modules.get("flashinfer"), "__version__", None)}
        about = gpu_run("benchmarks.kernels.attention", name, args.commit, others) | seconds
        (args.out / f"attention_{name}.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
