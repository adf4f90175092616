"""The LoRA kernels against other methods, on one GPU: microseconds, and the share of the memory floor.

    python -m benchmarks.kernels.lora --out benchmarks/results [--only step,decode,prefill,train,scaling]
    python -m benchmarks.kernels.lora --summarize            # from the committed results; needs no GPU

Each part writes `kernels_<part>.json`. Times are CUDA-graph replays over input sets larger than the L2.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import product
from typing import Any

import torch

from benchmarks.common.options import add_names, make_parser
from benchmarks.common.provenance import gpu_run
from benchmarks.common.timing import Timing, graph_us
from benchmarks.kernels import lora_backends as backends
from benchmarks.kernels import lora_cases as cases
from coserve.generate.execution.graph_sizes import TileCapacity, decode_tile_capacities
from coserve.generate.execution.slot_lora import fit_tiles
from coserve.kernels.lora import reference
from coserve.kernels.lora.backend import make_backend
from coserve.kernels.lora.segmented import terms
from coserve.kernels.lora.segmented.adapter_table import RANK_BLOCK
from coserve.kernels.lora.segmented.gradients import gradients
from coserve.kernels.lora.segmented.launch_prefill import prefill_shrink
from coserve.kernels.lora.segmented.plan import TilePlan, plan_of, tables_of, tile_rows
from coserve.kernels.lora.segmented.tiles import StepTiles, cut, upload
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair, MainGrads

BANDWIDTH = 4.30e12
"""Bytes a second of a device-to-device copy on the H200, read plus written."""
COMPUTE = 680e12
"""bf16 FLOP a second of a large product on the H200."""
L2_BYTES = 60e6
STK_BLOCKS = (128, 64, 32, 16)
Row = dict[str, Any]


def rotating(group: cases.SiteGroup, tokens: int, ranks: list[int]) -> list[cases.Layer]:
    """Enough copies of a case's inputs to pass through the L2 twice over."""
    first = cases.make_layer(group, tokens, ranks)
    size = first.weight_bytes + first.x.nbytes + sum(y.nbytes for y in first.ys)
    copies = max(2, min(16, int(2 * L2_BYTES / size) + 1))
    return [first, *(cases.make_layer(group, tokens, ranks) for _ in range(copies - 1))]


def floor_us(layer: cases.Layer, segments: Segments) -> float:
    """Each input read once and each output read and written once, or the arithmetic, whichever takes longer."""
    used = sorted(segments.runs)
    weights = sum(p.a_RD.nbytes + p.b_OR.nbytes for site in layer.pairs for u in used if (p := site[u]) is not None)
    size = weights + layer.x.nbytes + 2 * sum(y.nbytes for y in layer.ys)
    flop = sum(
        2 * (end - start) * pair.rank * (layer.group.inputs + pair.b_OR.shape[0])
        for slot, runs in segments.runs.items()
        for start, end in runs
        for site in layer.pairs
        if (pair := site[slot]) is not None
    )
    return max(size / BANDWIDTH, flop / COMPUTE) * 1e6


def error_of(layer: cases.Layer, segments: Segments) -> float:
    """Relative error of the LoRA terms alone (y = 0) against fp32, the worst of the group's sites."""
    ys = [torch.zeros_like(y) for y in layer.ys]
    wanted = [reference.lora_add(y.float(), layer.x, segments, pairs) for y, pairs in zip(ys, layer.pairs, strict=True)]
    with torch.no_grad():
        lora, group = cases.prepared(make_backend("segmented"), segments, layer.pairs)
        got = lora.add(group, ys, layer.x)
    worst = [float((g.float() - w).norm() / w.norm()) for g, w in zip(got, wanted, strict=True)]
    return max(worst)


def measure(group: cases.SiteGroup, adapter_of: list[int], length: int, ranks: list[int], tag: Row) -> Row:
    """One row of the grid: every column's microseconds for all the group's sites together."""
    segments = cases.batch(adapter_of, length)
    layers = rotating(group, segments.tokens, ranks)
    columns: dict[str, Timing] = {}

    def column(name: str, make: Callable[[cases.Layer], backends.Call], *, replays: int = 11) -> None:
        columns[name] = graph_us([make(layer) for layer in layers], replays=replays)
        torch.cuda.empty_cache()

    column("segmented", lambda layer: backends.segmented_call(layer, segments))
    column("grouped", lambda layer: backends.grouped_call(layer, segments), replays=7)
    for block in STK_BLOCKS:
        column(f"stk{block}", partial(backends.stk_call, segments=segments, block=block), replays=7)
    if segments.tokens in (64, 4096):
        column("block_sparse", lambda layer: backends.block_sparse_call(layer, segments), replays=7)
    if length == 1 and len(set(adapter_of)) * max(ranks) <= 1024:
        column("gather_bmm", lambda layer: backends.gather_bmm_call(layer, segments), replays=7)
    floor = floor_us(layers[0], segments)
    row = {
        **tag,
        "group": group.name,
        "tokens": segments.tokens,
        "adapters": len(set(adapter_of)),
        "floor_us": round(floor, 3),
        "of_floor": round(floor / columns["segmented"].us, 3),
        "error": round(error_of(layers[0], segments), 5),
        "us": {name: timing.record() for name, timing in columns.items()},
    }
    shown = " ".join(f"{name} {timing.us:.1f}" for name, timing in columns.items())
    print({k: v for k, v in row.items() if k != "us"}, shown, flush=True)
    return row


def _ranks(name: str, count: int) -> list[int]:
    mixed = (8, 16, 32, 64, 128)
    return [mixed[index % len(mixed)] for index in range(count)] if name == "mixed" else [int(name)] * count


POPULARITIES = ("distinct", "uniform", "skewed", "identical")


def grid(tokens: tuple[int, ...], sequences: Callable[[int], int]) -> Iterator[Row]:
    """Llama's sites with every rank at every size, rank 16 at every popularity, the others at two; GPT-2's with mixed
    ranks at every size and popularity."""
    for model, groups, ranks in (
        ("llama-3.1-8b", cases.LLAMA, ("16", "8", "64", "mixed")),
        ("gpt2-medium", cases.GPT2_MEDIUM, ("mixed",)),
    ):
        for group in groups:
            for count, rank in product(tokens, ranks):
                some: tuple[str, ...] = POPULARITIES if rank == ranks[0] else ("distinct", "skewed")
                some = some if count > 1 else ("distinct",)  # one token: they are the same
                for popularity in some:
                    units = sequences(count)
                    owner = cases.owners(popularity, units)
                    tag = {"model": model, "popularity": popularity, "ranks": rank}
                    yield measure(group, owner, count // units, _ranks(rank, max(owner) + 1), tag)
                    gc.collect()


def decode_part() -> Iterator[Row]:
    """One token a sequence."""
    return grid((1, 8, 32, 64, 256), lambda tokens: tokens)


def prefill_part() -> Iterator[Row]:
    """Eight sequences."""
    return grid((512, 4096), lambda _: 8)


def decode_stack(layers: int, tokens: int, ranks: list[int]) -> list[cases.Layer]:
    return [cases.make_layer(group, tokens, ranks) for _ in range(layers) for group in cases.LLAMA]


EXACT = TileCapacity(0, 0)


def step_call(
    sets: list[cases.Layer], adapter_of: list[int], ranks: list[int], capacity: TileCapacity | None
) -> backends.Call:
    """The LoRA part of a decode step over a slot table, in a graph of this `capacity`.

    None: the capacity that the engine chooses; EXACT: exactly this batch.
    """
    slots, firsts = cases.fill_slots(sets, len(ranks))
    segments = cases.batch(adapter_of, 1)
    tokens, R = segments.tokens, -(-max(ranks) // 16) * 16
    if capacity == EXACT:
        rows, decode = tile_rows(segments)
        tiles = upload(cut(segments, ranks, rows), rows, tokens, cases.DEVICE)
        cut_as = TilePlan(tiles, R, decode)
    else:
        if capacity is None:
            capacity, (host,) = fit_tiles(segments, [ranks], decode_tile_capacities(tokens))
        else:
            host = cut(segments, ranks, capacity.rows)
        static = StepTiles(capacity.rows, capacity.tiles, capacity.tiles * R // RANK_BLOCK, tokens, cases.DEVICE)
        static.load(host)
        cut_as = TilePlan(static.tiles, R, True)
    tables = [slots.table(first, len(layer.ys)) for layer, first in zip(sets, firsts, strict=True)]

    def call() -> None:
        for layer, table in zip(sets, tables, strict=True):
            terms.add_(layer.ys, layer.x, cut_as, table)

    return call


def step_part() -> list[Row]:
    """A whole Llama-3.1-8B decode step's LoRA terms, 64 tokens; and four layers of it by the other calls."""
    pairs_of_two = [index // 2 for index in range(64)]
    rows: list[Row] = []
    sets = decode_stack(32, 64, [16] * 32)
    for name, owner, capacity in (
        ("a32", pairs_of_two, None),
        ("a1", [0] * 64, None),
        ("a32.exact", pairs_of_two, EXACT),
        ("a1.exact", [0] * 64, EXACT),
        ("a32.bucket64", pairs_of_two, TileCapacity(8, 64)),
        ("a1.bucket64", [0] * 64, TileCapacity(8, 64)),
    ):
        timing = graph_us([step_call(sets, owner, [16] * 32, capacity)], replays=31)
        rows.append({"case": f"step.{name}", "layers": 32, "us": {"segmented": timing.record()}})
        print(rows[-1], flush=True)
    four = sets[:16]
    segments = cases.batch(pairs_of_two, 1)
    makes: dict[str, Callable[[cases.Layer], backends.Call]] = {
        "segmented": partial(backends.segmented_call, segments=segments),
        "grouped": partial(backends.grouped_call, segments=segments),
        **{f"stk{b}": partial(backends.stk_call, segments=segments, block=b) for b in STK_BLOCKS},
    }
    for name, make in makes.items():
        timing = graph_us([make(layer) for layer in four], replays=9)
        per_layer = Timing(timing.us * 4, timing.low * 4, timing.high * 4)
        rows.append({"case": f"layer.a32.{name}", "layers": 4, "us": {name: per_layer.record()}})
        print(rows[-1], flush=True)
    return rows


def _with_sums(pairs: Sequence[LoraPair | None]) -> tuple[LoraPair | None, ...]:
    """The same pairs with fp32 sums of their gradients."""

    def sums(pair: LoraPair) -> MainGrads:
        return MainGrads(
            torch.zeros_like(pair.a_RD, dtype=torch.float32), torch.zeros_like(pair.b_OR, dtype=torch.float32)
        )

    return tuple(None if pair is None else replace(pair, main_grads=sums(pair)) for pair in pairs)


def train_part() -> list[Row]:
    """4096 tokens over 8 adapters of rank 16, a layer's seven sites: LoRA forward and backward, and the base's."""
    segments = cases.batch(list(range(8)), 512)
    rows: list[Row] = []
    for group in cases.LLAMA:
        layers = [cases.make_layer(group, 4096, [16] * 8) for _ in range(2)]
        weights = backends.base_weights(layers[0])
        prepared = []
        for layer in layers:
            (own,) = tables_of([layer.pairs], cases.DEVICE)
            plan = plan_of(segments, own.ranks, cases.DEVICE, train=True)
            h = prefill_shrink(layer.x, plan, own.table)
            (summed,) = tables_of([[_with_sums(pairs) for pairs in layer.pairs]], cases.DEVICE)
            prepared.append((layer, own, plan, h, torch.zeros_like(layer.x), summed))

        def forward(item: tuple[Any, ...]) -> backends.Call:
            layer, own, plan, *_ = item
            return lambda: terms.train(layer.ys, layer.x, plan, own)

        def backward(item: tuple[Any, ...], *, add: bool) -> backends.Call:
            layer, own, plan, h, dx, _ = item

            def call() -> None:
                own_dx, _ = gradients(layer.ys, layer.x, h, plan, own, inputs_need=True, weights_need=True)
                if add:  # autograd adds the term to the base's own dx
                    dx.add_(own_dx)

            return call

        def backward_summed(item: tuple[Any, ...]) -> backends.Call:
            """As fine-tuning runs it: the kernels add dA and dB to fp32 sums; dX is what the base's products are added
            to."""
            layer, _, plan, h, _, own = item
            return lambda: gradients(layer.ys, layer.x, h, plan, own, inputs_need=True, weights_need=True)

        def base_backward(layer: cases.Layer) -> backends.Call:
            return lambda: [torch.mm(dy, weight) for dy, weight in zip(layer.ys, weights, strict=True)]  # noqa: B023

        columns = {
            "base_forward": graph_us([backends.base_call(layer, weights) for layer in layers], replays=9, repeat=3),
            "base_backward": graph_us([base_backward(layer) for layer in layers], replays=9, repeat=3),
            "forward": graph_us([forward(item) for item in prepared], replays=9, repeat=3),
            "backward": graph_us([backward(item, add=False) for item in prepared], replays=9, repeat=3),
            "backward_summed": graph_us([backward_summed(item) for item in prepared], replays=9, repeat=3),
            "backward_and_add": graph_us([backward(item, add=True) for item in prepared], replays=9, repeat=3),
        }
        for backend_name in ("segmented", "stk64", "stk128"):
            try:
                calls = [backends.learning_call(layer, segments, backend_name) for layer in layers]
                columns[f"autograd_{backend_name}"] = graph_us(calls, replays=7)
            except RuntimeError as error:
                print(f"autograd_{backend_name} left out: {error}", flush=True)
        rows.append({"group": group.name, "us": {name: timing.record() for name, timing in columns.items()}})
        print(group.name, {name: round(timing.us, 1) for name, timing in columns.items()}, flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def scaling_part() -> list[Row]:
    """GPT-2 medium's sites with the base's products, 1 to 64 adapters of ranks 16 to 128 (ETS figure 5.1's setting);
    and mixed ranks against their average."""
    rows: list[Row] = []
    for adapters in (1, 2, 4, 8, 16, 24, 32, 64):
        ranks = [(16, 32, 64, 128)[index % 4] for index in range(adapters)] if adapters > 1 else [60]
        for name, units, length in (("decode", 64, 1), ("prefill", 64, 128)):
            owner = sorted(index % adapters for index in range(units))
            segments = cases.batch(owner, length)
            total: dict[str, float] = {}
            for group in cases.GPT2_MEDIUM:
                layers = rotating(group, segments.tokens, ranks)
                weights = backends.base_weights(layers[0])
                makes: dict[str, Callable[[cases.Layer], backends.Call]] = {
                    "base": partial(backends.base_call, weights=weights),
                    "segmented": partial(backends.segmented_call, segments=segments),
                }
                for backend_name, make in makes.items():
                    calls = [make(layer) for layer in layers]
                    total[backend_name] = total.get(backend_name, 0.0) + graph_us(calls, replays=7).us
            rows.append({"case": f"gpt2.{name}", "adapters": adapters, "tokens": segments.tokens, "us": total})
            print(rows[-1], flush=True)
            gc.collect()
    for name, units, length in (("decode", 64, 1), ("prefill", 8, 512)):
        adapters = 32 if name == "decode" else 8
        owner = sorted(index % adapters for index in range(units))
        for ranks in ([(8, 16, 32, 64)[i % 4] for i in range(adapters)], [30] * adapters, [32] * adapters):
            total = {"segmented": 0.0}
            for group in cases.LLAMA:
                segments = cases.batch(owner, length)
                layers = rotating(group, segments.tokens, ranks)
                calls = [backends.segmented_call(layer, segments) for layer in layers]
                total["segmented"] += graph_us(calls, replays=9).us
            label = "mixed" if len(set(ranks)) > 1 else str(ranks[0])
            rows.append({"case": f"ranks.{name}", "ranks": label, "us": total})
            print(rows[-1], flush=True)
            gc.collect()
    return rows


PARTS: dict[str, Callable[[], Iterable[Row]]] = {
    "step": step_part,
    "train": train_part,
    "scaling": scaling_part,
    "decode": decode_part,
    "prefill": prefill_part,
}


def main() -> None:
    parser = make_parser(__doc__)
    add_names(parser, "--only", PARTS)
    parser.add_argument("--summarize", action="store_true", help="write summary.json and the figures, and stop")
    chosen = parser.parse_args()
    if chosen.summarize:
        from benchmarks.kernels import summary as kernel_summary

        kernel_summary.summarize(chosen.out)
        return
    chosen.out.mkdir(parents=True, exist_ok=True)
    for part in chosen.only:
        torch.manual_seed(0)
        begun = time.perf_counter()
        about = gpu_run("benchmarks.kernels.lora", part, chosen.commit, {"stk": version("stanford-stk")})
        rows: list[Row] = []
        for row in PARTS[part]():  # written after each row: an interrupted run keeps its rows
            rows.append(row)
            result = {"part": part, **about, "seconds": round(time.perf_counter() - begun, 1), "rows": rows}
            (chosen.out / f"kernels_{part}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(f"{part}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
