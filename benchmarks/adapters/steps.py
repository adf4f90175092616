"""The part of a decode step that adapters add, on one GPU: many distinct ones, one merged into the base, copies.

    python -m benchmarks.adapters.steps --out benchmarks/results [--only distinct,merged,copies,mixed,sites]

All linear sites of the Llama-3.1-8B shape, adapters of rank 16 (84 MB each), random bf16 values, CUDA graphs of whole
steps.

`distinct`: the LoRA terms of 64, 128 and 256 tokens in Punica's four popularities (section 7), and the bytes of the
adapters in the step over their time. `merged`: the base's products alone, as with one adapter merged into the base
(S-LoRA's figure 7), and with the terms of one adapter. Attention, norms and sampling are left out, so a whole step
gains less. Merging itself is timed, too. `copies`: adapters from pinned memory to pages, before a step on its stream as
the engine does it, and beside the step on a stream of their own. `mixed`: the LoRA terms of steps of 512 to 2,048
tokens, decodes of so many distinct adapters and one prompt, by the prefill kernels (tiles of 64 rows) and by the decode
kernels (of 8): `mixed_tile_capacities`. `sites`: S-LoRA's S1 and S2 (`many.py`), 160 adapters of rank 8 or of ranks 8
to 64 at q, k, v and o, in the tiles of the daemon's graphs of these sites (`own`) and of all sites (`every`), which
launch the MLP's terms over nothing; and in as many tiles as the step has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from benchmarks.adapters.cases import REAL
from benchmarks.common.options import add_names, make_parser
from benchmarks.common.results import Results, Target
from benchmarks.common.timing import event_us, graph_us
from benchmarks.kernels import lora_backends as backends
from benchmarks.kernels import lora_cases as cases
from benchmarks.kernels.lora import step_call
from coserve.generate.execution.graph_sizes import decode_tile_capacities, mixed_tile_capacities
from coserve.generate.execution.slot_lora import fit_tiles
from coserve.kernels.lora.segmented import terms
from coserve.kernels.lora.segmented.plan import DECODE_ROWS, PREFILL_TILE_ROWS, TilePlan, whole_ranks
from coserve.kernels.lora.segmented.tiles import cut as tiles_of
from coserve.kernels.lora.segmented.tiles import upload

LAYERS, RANK, ADAPTERS = 32, 16, 256
BATCHES, POPULARITIES = (64, 128, 256), ("distinct", "uniform", "skewed", "identical")
MIXED_TOKENS, MIXED_ADAPTERS = (512, 768, 1024, 2048), (8, 32, 64, 96, 177, 238)
SITES_TOKENS, SITES_ADAPTERS = (256, 512, 1024, 2048), 160
"""Tokens of a step, the first without prompts, and its adapters, as in a simulation of S1 and S2 (`host.py`)."""
MERGED_BATCHES = (1, 2, 4, 8, 16, 32, 64)
GAIN = 1.1
"""What merging must gain to be worth it."""
LOADED, BLOCK = 3, 8 << 20
"""Adapters that are loaded before one step, and bytes of a copy."""


def stack(tokens: int, adapters: int) -> list[cases.Layer]:
    """The site groups of all layers."""
    return [cases.make_layer(group, tokens, [RANK] * adapters) for _ in range(LAYERS) for group in cases.LLAMA]


def cut(layers: list[cases.Layer], tokens: int) -> list[cases.Layer]:
    """The same layers for the first `tokens` tokens."""
    return [replace(each, x=each.x[:tokens].clone(), ys=[y[:tokens].clone() for y in each.ys]) for each in layers]


def adapter_bytes(layers: list[cases.Layer]) -> int:
    """Bytes of one adapter."""
    pairs = [site[0] for layer in layers for site in layer.pairs]
    return sum(pair.a_RD.nbytes + pair.b_OR.nbytes for pair in pairs if pair is not None)


def distinct(results: Results) -> None:
    layers = stack(max(BATCHES), ADAPTERS)
    size = adapter_bytes(layers)
    for tokens in BATCHES:
        some = cut(layers, tokens)
        for popularity in POPULARITIES:
            owners = cases.owners(popularity, tokens)
            used = len(set(owners))
            timing = graph_us([step_call(some, owners, [RANK] * (max(owners) + 1), None)], replays=9)
            about = {"adapters": used, "adapter_bytes": used * size, "gb_s": round(used * size / timing.us / 1e3, 1)}
            key = f"adapters.terms_ms.{popularity}.b{tokens}"
            values = [timing.low / 1e3, timing.high / 1e3]
            results.put(key, round(timing.us / 1e3, 4), "ms a step", None, values, about)


def mixed(results: Results) -> None:
    layers = stack(max(MIXED_TOKENS), max(MIXED_ADAPTERS))
    for tokens in MIXED_TOKENS:
        some = cut(layers, tokens)
        for adapters in MIXED_ADAPTERS:
            owners = [0] * (tokens - adapters + 1) + list(range(1, adapters))
            ranks = [RANK] * adapters
            found = {
                rows: graph_us([_tiled(some, owners, ranks, rows)], replays=9)
                for rows in (PREFILL_TILE_ROWS, DECODE_ROWS[0])
            }
            about = {f"rows{rows}_ms": round(timing.us / 1e3, 4) for rows, timing in found.items()}
            best = min(found.values(), key=lambda timing: timing.us)
            key = f"adapters.terms_ms.mixed.t{tokens}.a{adapters}"
            values = [best.low / 1e3, best.high / 1e3]
            results.put(key, round(best.us / 1e3, 4), "ms a step", None, values, about)


def _tiled(layers: list[cases.Layer], owners: list[int], ranks: list[int], rows: int) -> backends.Call:
    """The terms of a step whose tiles have so many rows."""
    slots, firsts = cases.fill_slots(layers, len(ranks))
    segments = cases.batch(owners, 1)
    tiles = upload(tiles_of(segments, ranks, rows), rows, segments.tokens, cases.DEVICE)
    plan = TilePlan(tiles, whole_ranks(tuple(ranks)), rows < PREFILL_TILE_ROWS)
    tables = [slots.table(first, len(layer.ys)) for layer, first in zip(layers, firsts, strict=True)]

    def call() -> None:
        for layer, table in zip(layers, tables, strict=True):
            terms.add_(layer.ys, layer.x, plan, table)

    return call


def sites(results: Results) -> None:
    for kind in ("s1", "s2"):
        ranks = [REAL[kind][i % len(REAL[kind])] for i in range(SITES_ADAPTERS)]
        layers = [cases.make_layer(group, max(SITES_TOKENS), ranks) for _ in range(LAYERS) for group in cases.LLAMA[:2]]
        without = [cases.make_layer(group, max(SITES_TOKENS), [8]) for group in cases.LLAMA[2:]]
        for layer in without:
            layer.pairs = [(None,) * SITES_ADAPTERS for _ in layer.pairs]
        every = [each for i in range(0, len(layers), 2) for each in (*layers[i : i + 2], *without)]
        for tokens in SITES_TOKENS:
            decodes = min(tokens, max(BATCHES))
            owners = sorted([i % SITES_ADAPTERS for i in range(decodes)] + [i % 4 for i in range(tokens - decodes)])
            capacities = decode_tile_capacities(tokens) if tokens == decodes else mixed_tile_capacities(tokens, decodes)
            capacity, (host,) = fit_tiles(cases.batch(owners, 1), [ranks], capacities)
            about: dict[str, float] = {"rows": capacity.rows, "tiles": len(host.tiles), "capacity": capacity.tiles}
            some = cut(layers, tokens)
            calls = {f"rows{n}_ms": _tiled(some, owners, ranks, n) for n in (PREFILL_TILE_ROWS, DECODE_ROWS[0])}
            if capacity.decode:
                calls["own_ms"] = step_call(some, owners, ranks, capacity)
                calls["every_ms"] = step_call(cut(every, tokens), owners, ranks, capacity)
            about |= {name: round(graph_us([call], replays=9).us / 1e3, 4) for name, call in calls.items()}
            value = about["own_ms" if capacity.decode else f"rows{capacity.rows}_ms"]
            results.put(f"adapters.terms_ms.{kind}.t{tokens}", value, "ms a step", about=about)


def merged(results: Results) -> None:
    layers = stack(max(MERGED_BATCHES), 1)
    weights = [backends.base_weights(layer) for layer in layers]
    for tokens in MERGED_BATCHES:
        some = cut(layers, tokens)
        products = [backends.base_call(layer, own) for layer, own in zip(some, weights, strict=True)]
        terms = step_call(some, [0] * tokens, [RANK], None)

        def base(products: list[backends.Call] = products) -> None:
            for product in products:
                product()

        def both(terms: backends.Call = terms, base: Callable[[], None] = base) -> None:
            base()
            terms()

        alone, beside = graph_us([base], replays=9), graph_us([both], replays=9)
        about = {"merged_ms": round(alone.us / 1e3, 4), "adapter_ms": round(beside.us / 1e3, 4)}
        gain = beside.us / alone.us
        results.put(f"adapters.merged_gain.b{tokens}", round(gain, 4), "of the merged base", Target(GAIN), about=about)
    pairs = [site[0] for layer in layers for site in layer.pairs]
    flat = [weight for own in weights for weight in own]

    def merge() -> None:
        for weight, pair in zip(flat, pairs, strict=True):
            if pair is not None:
                weight.addmm_(pair.b_OR, pair.a_RD, alpha=pair.scaling)

    timing = event_us([merge], rounds=5)
    results.put("adapters.merge_ms", round(timing.us / 1e3, 3), "ms to merge one adapter into the base")


def copies(results: Results) -> None:
    layers = stack(64, 1)
    weights = [backends.base_weights(layer) for layer in layers]
    size = adapter_bytes(layers)
    pieces = [min(BLOCK, size - at) for at in range(0, size, BLOCK)]
    host = [torch.empty(piece, dtype=torch.uint8, pin_memory=True) for piece in pieces]
    device = [torch.empty_like(piece, device=cases.DEVICE) for piece in host]
    own, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    calls = [backends.base_call(layer, weight) for layer, weight in zip(layers, weights, strict=True)]
    calls.append(step_call(layers, [0] * 64, [RANK], None))
    _all(calls)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        _all(calls)

    def load() -> None:
        for _ in range(LOADED):
            for source, target in zip(host, device, strict=True):
                target.copy_(source, non_blocking=True)

    def before() -> None:
        load()
        graph.replay()

    def beside() -> None:
        own.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(own):
            load()
        graph.replay()
        torch.cuda.current_stream().wait_stream(own)

    ways: dict[str, Callable[[], None]] = {"step": graph.replay, "copy": load, "before": before, "beside": beside}
    found = {name: _ms(call) for name, call in ways.items()}
    about = {f"{name}_ms": round(median(values), 3) for name, values in found.items()}
    about |= {"adapters": LOADED, "bytes": LOADED * size}
    for name in ("before", "beside"):
        added = [value - median(found["step"]) for value in found[name]]
        key = f"adapters.copy_added_ms.{name}"
        results.put(key, round(median(added), 3), "ms added to a step by three loads", None, added, about)


def _all(calls: list[backends.Call]) -> None:
    for call in calls:
        call()


def _ms(call: Callable[[], None], rounds: int = 15) -> list[float]:
    """Milliseconds of each call, from the host."""
    times = list[float]()
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return times[3:]


PARTS: dict[str, Callable[[Results], None]] = {
    "merged": merged,
    "copies": copies,
    "distinct": distinct,
    "mixed": mixed,
    "sites": sites,
}


def main() -> None:
    parser = make_parser(__doc__)
    add_names(parser, "--only", PARTS)
    options = parser.parse_args()
    settings = {"layers": LAYERS, "rank": RANK, "adapters": ADAPTERS, "block": BLOCK, "loaded": LOADED}
    results = Results.of(options, "adapter_steps.json", __file__, settings)
    for part in options.only:
        torch.manual_seed(0)
        began = time.perf_counter()
        PARTS[part](results)
        torch.cuda.empty_cache()
        print(f"{part}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
