"""Tensor parallelism and LoRA's sharding strategies on N GPUs: the BD-LoRA paper's figures 1 and 5 and table 2.

    python -m benchmarks.bdlora.measure --tp 2 --budget 350                     # 8B and 70B, most important rows first
    python -m benchmarks.bdlora.measure --summarize [FILE ...]                  # take results in; keys, table, \
        figures; no GPU
    TRITON_INTERPRET=1 python -m benchmarks.bdlora.measure --tiny --tp 2 --out /tmp/tried

Llama-3.1 shapes with random bf16 weights, made on the GPUs; adapters on all seven sites of a layer, one for all
requests (as in the paper). One process a GPU; each runs coserve's executor (compiled layers, adapter slots, CUDA
graphs) over the same schedule, without HTTP and without the channel from rank 0 to the others. Greedy, every request to
its last token. Each row is written as soon as it is measured; rows of earlier runs stay.

Variants: `base`; `nfs`, `slora` and `bd` at LoRA's rank r (`.r64`). `bd` has the rank of the paper's table 1 with as
many parameters, r' = r (dH + dI) / (dH + dI / N), rounded as `bd_rank` says; rows have its rank and both adapters'
parameters.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.bdlora import results as bdlora_results
from benchmarks.bdlora.plan import PARTS, TINY_LOADS, TINY_RANKS, Item, Plan
from benchmarks.bdlora.ranks import RankFailed, RankProcesses
from benchmarks.bdlora.warm import warm_caches
from benchmarks.bdlora.warm_tasks import tasks
from benchmarks.common.options import add_names, make_parser
from benchmarks.common.results import Results

SEED = 11
BUILD_SECONDS = {"8b": 30.0, "8b@1": 30.0, "70b": 60.0}
"""Least time left at which a base is built."""
LIMITS = {"build": 240.0, "drop": 30.0}
WARM_LIMIT = 150.0
"""Most seconds in which the compilers' caches are filled."""
ITEM_LIMIT = 120.0
"""Seconds after which a call is given up: a rank hangs."""


class Run:
    """One run: the processes, and the rows."""

    def __init__(self, ranks: RankProcesses, results: Results, deadline: float) -> None:
        self._ranks, self._results, self._deadline = ranks, results, deadline
        self._layers: dict[str, int] = {}
        """Of the bases that are there."""
        self._done = set[str]()
        """Keys of the rows that this run has written."""
        self.left: list[str] = []
        """What no time was left for."""

    def measure(self, item: Item) -> None:
        """Writes the item's row; builds its base if it is not there."""
        if item.what == "drop":
            if self._layers.pop(item.model, None) is not None:
                self._call(item, item.model)
            return
        key = bdlora_results.key_of(item, self._ranks.size)
        if key in self._done:
            return
        there = item.what == "messages" or item.model in self._layers
        if time.monotonic() > self._deadline or not (there or self._build(item)):
            self.left.append(key)
            return
        self._done.add(key)
        began = time.monotonic()
        match item.what:
            case "generate":
                found = self._call(item, item.model, item.variant, item.load, item.repeats)
            case "decode":
                found = self._call(item, item.model, item.variant, item.load, item.repeats, item.adapters)
            case "prefill":
                found = self._call(item, item.model, item.variant, item.load, item.repeats)
            case "messages":
                found = self._call(item, item.model)
            case "profile":
                found = self._call(item, item.model, item.variant, item.load)
            case _:
                found = self._call(item, item.model, item.repeats)
        found["layers"] = self._layers.get(item.model, 0)
        bdlora_results.put(self._results, item, self._ranks.size, found, round(time.monotonic() - began, 2))

    def _build(self, item: Item) -> bool:
        """False: no time is left for it."""
        if self._deadline - time.monotonic() < BUILD_SECONDS.get(item.model, 0.0):
            return False
        found = self._call(Item("build", item.model, item.variant), item.model)
        self._layers[item.model] = found["layers"]
        seconds = sum(value for name, value in found.items() if not name.startswith("layers"))
        key = f"{bdlora_results.prefix(item.model, self._ranks.size)}.build_s"
        self._results.put(key, round(seconds, 1), "s", about=found)
        return True

    def _call(self, item: Item, *args: object) -> dict[str, Any]:
        only = [0] if item.model.endswith("@1") else None
        return self._ranks.call(item.what, *args, limit=LIMITS.get(item.what, ITEM_LIMIT), only=only)


def main() -> None:
    parser = make_parser(__doc__, tiny="tiny shapes on the CPU over gloo, to try the script")
    parser.add_argument("--tp", type=int, default=2, help="ranks, each on a GPU")
    add_names(parser, "--only", PARTS, what="parts, in this order")
    parser.add_argument("--ranks", default="", help="LoRA's ranks, most important first")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no row is begun")
    parser.add_argument("--warm", action="store_true", help="with --tiny: also run what fills the compilers' caches")
    parser.add_argument(
        "--summarize", nargs="*", type=Path, help="take in these results, update keys and figures, stop"
    )
    options = parser.parse_args()
    if options.summarize is not None:
        bdlora_results.summarize(options.out, options.summarize)
        return
    ranks = tuple(int(rank) for rank in options.ranks.split(",") if rank)
    plan = Plan(options.tp, TINY_RANKS, TINY_LOADS, "tiny", "tiny_large") if options.tiny else Plan(options.tp)
    plan = plan.with_ranks(ranks) if ranks else plan
    folder = Path(tempfile.gettempdir()) / f"coserve-bdlora-tp{options.tp}{'-tiny' if options.tiny else ''}"
    began = time.monotonic()
    deadline = began + options.budget
    work = [] if options.tiny and not options.warm else tasks(plan.models(options.only))
    with RankProcesses(options.tp, folder, tiny=options.tiny) as processes:
        warm_caches(work, options.tp, folder, tiny=options.tiny, limit=min(WARM_LIMIT, max(60.0, options.budget / 3)))
        machine = processes.call("hardware", limit=ITEM_LIMIT + 30.0)
        print(
            machine, f"{time.monotonic() - deadline + options.budget:.1f} s" if options.budget < 1e9 else "", flush=True
        )
        settings = machine | {"tp": options.tp, "ranks": plan.ranks, "parts": options.only}
        results = Results.of(options, bdlora_results.FILE, __file__, settings, seed=SEED, hardware=machine["hardware"])
        run = Run(processes, results, deadline)
        try:
            for part in options.only:
                for item in plan.items(part):
                    run.measure(item)
        except RankFailed as error:
            print(error, flush=True)
            raise SystemExit(1) from error
        finally:
            if run.left:
                print("no time was left for", *run.left, flush=True)
    bdlora_results.summarize(options.out, [])


if __name__ == "__main__":
    main()
