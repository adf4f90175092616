"""Serving in process, through the engine: sampling, adapters of mixed ranks, the GPU's idle share, base-only texts.

    python -m benchmarks.serving.in_process --out benchmarks/results [--only KEY,...]
    python -m benchmarks.serving.in_process --summarize                # the keys in summary.json; needs no GPU
    TRITON_INTERPRET=1 python -m benchmarks.serving.in_process --tiny --out /tmp/tried

An 8B Llama-3.1 shape with random bf16 weights, made on the GPU; adapters on all seven sites of a layer. Greedy, every
request to its last token. Each row is written as soon as it is measured; rows of earlier runs stay. Adapters of one
rank, and vLLM in the same loads: `benchmarks/peers/offline.py`.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.common import results as serving_results
from benchmarks.common.options import add_names, make_parser
from benchmarks.common.results import Results, Target
from benchmarks.serving import idle as serving_idle
from benchmarks.serving.case import ADAPTERS, FULL, RANKS, SEED, TINY, Bench, Load, make_base
from coserve.core.sampling import SamplingParams

DRAWN, TOP_P = SamplingParams(temperature=0.8), SamplingParams(temperature=0.8, top_p=0.95)


@dataclass(frozen=True)
class Work:
    """One row of the table: output tokens a second of a load."""

    key: str
    load: Load
    repeats: int = 3


def decode(sequences: int, adapters: int, family: str = "a") -> Load:
    return Load(sequences, 16, 256, adapters, family)


ROWS = (
    Work("serving.decode_tok_s.b64.a0", decode(64, 0)),
    Work("serving.decode_tok_s.b64.a0.drawn", replace(decode(64, 0), sampling=DRAWN), 1),
    Work("serving.decode_tok_s.b64.a0.top_p", replace(decode(64, 0), sampling=TOP_P), 1),
    Work("serving.decode_tok_s.b64.a32.mixed", decode(64, 32, "m")),
    Work("serving.out_tok_s.512x128.a32.mixed", Load(512, 512, 128, 32, "m"), 2),
)
IDLE = {"serving.gpu_idle.b64.a0": 0, "serving.gpu_idle.b64.a32": 32}
BASE_ONLY = "serving.base_only_same"
KEYS = (BASE_ONLY, *(work.key for work in ROWS), *IDLE)


def smaller(load: Load) -> Load:
    """What Triton's interpreter runs in seconds."""
    few, short = min(load.requests, 4), min(load.prompt, 12)
    return replace(load, requests=few, prompt=short, output=6, adapters=min(load.adapters, 2))


def base_only(bench: Bench, results: Results, tiny: bool) -> None:
    """Token ids of a batch without adapters before any adapter is resident, and with 32 of them loaded and used.

    Also in one batch with 32 requests that have adapters: there the batch size differs, so products may round
    differently.
    """
    load = Load(32, 100, 64)
    load, beside = (smaller(one) if tiny else one for one in (load, replace(load, adapters=ADAPTERS)))
    vocab = bench.shape.vocab
    asked, others = load.make_requests("base_only", vocab), beside.make_requests("beside", vocab)
    before = bench.texts(asked)
    bench.publish("a")
    bench.texts(others)
    after = bench.texts(asked)
    mixed = bench.texts([*asked, *others])
    same = sum(before[id] == after[id] for id in before) / len(before)
    about = {
        "what": "sequences whose token ids are equal with and without 32 adapters resident",
        "tokens": load.output,
        "same_beside_adapters": sum(before[id] == mixed[id] for id in before) / len(before),
    }
    results.put(BASE_ONLY, same, "fraction", Target(1.0), about=about)


async def measure(bench: Bench, rows: Sequence[Work], results: Results, deadline: float, tiny: bool) -> list[str]:
    """Output tokens a second; the keys that no time was left for."""
    left = list[str]()
    for work in rows:
        if time.monotonic() > deadline:
            left.append(work.key)
            continue
        load = smaller(work.load) if tiny else work.load
        found = await bench.speeds(load, work.key, 1 if tiny else work.repeats)
        results.put(work.key, round(statistics.median(found), 1), "output tok/s", None, found)
    return left


async def everything(
    bench: Bench, wanted: Sequence[str], results: Results, deadline: float, *, tiny: bool
) -> list[str]:
    async with bench.serving():
        left = await measure(bench, [work for work in ROWS if work.key in wanted], results, deadline, tiny)
        for key in (key for key in IDLE if key in wanted):
            if time.monotonic() > deadline:
                left.append(key)
                continue
            load = Load(64, 16, 256, IDLE[key])
            found = await serving_idle.measure(bench, smaller(load) if tiny else load)
            results.put(key, found.idle, "fraction", Target(0.05, most=True), about=found.about())
    return left


def main() -> None:
    parser = make_parser(__doc__, tiny="a tiny shape on the CPU, to try the script")
    add_names(parser, "--only", KEYS, what="keys")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no row is begun")
    parser.add_argument("--summarize", action="store_true", help="bring summary.json up to date, and stop")
    options = parser.parse_args()
    if options.summarize:
        serving_results.summarize("serving.json", options.out)
        return
    wanted, deadline, began = options.only, time.monotonic() + options.budget, time.monotonic()
    shape = TINY if options.tiny else FULL
    bench = Bench(make_base(shape), shape)
    print(f"base after {time.monotonic() - began:.1f} s", flush=True)
    families = {work.load.family for work in ROWS if work.key in wanted and work.load.adapters}
    families |= {"a"} if BASE_ONLY in wanted or any(IDLE.get(key) for key in wanted) else set()
    seconds = bench.capture([max(RANKS[family]) for family in sorted(families)])
    print(f"compiled and captured in {seconds:.1f} s", flush=True)
    settings = vars(shape) | {"ranks": {name: RANKS[name] for name in sorted(families)}, "capture_s": round(seconds, 1)}
    results = Results.of(options, "serving.json", __file__, settings, seed=SEED)
    if BASE_ONLY in wanted:  # first: it publishes the adapters `a` itself
        base_only(bench, results, options.tiny)
    for family in families - ({"a"} if BASE_ONLY in wanted else set()):
        bench.publish(family)
    left = asyncio.run(everything(bench, wanted, results, deadline, tiny=options.tiny))
    if left:
        print("no time was left for", *left, flush=True)
    serving_results.summarize("serving.json", options.out)


if __name__ == "__main__":
    main()
