"""How long adapters' terms of experts would take if other GPUs computed them: the messages of a layer, there and back,
between two GPUs, at Qwen3-30B-A3B's shape. Nothing is computed.

    python -m benchmarks.moe.ping_pong --out benchmarks/results [--gpus 4]
    python -m benchmarks.moe.ping_pong --tiny --out /tmp/tried     # two processes, gloo
    python -m benchmarks.moe.ping_pong --table                     # of the committed results
    python -m benchmarks.moe.ping_pong --transports --out R        # coserve's own transports in place of these ways

A layer has two exchanges. The first sends a token's input and gets the terms of gate and up of each chosen expert; the
second sends the inputs of down and gets the sum of its terms. An exchange is timed in a CUDA graph of many, so each of
its four messages counts with launch, flight and wait. `--gpus 4`: two pairs at the same time. `infini.step_ms` is the
time that all layers' exchanges take, one after the other. `beside_ms` of a row is what is left where each exchange runs
beside the base's own product (gate and up, or down), whose time is that of reading the chosen experts at
`--bandwidth`.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.options import make_parser
from benchmarks.common.results import Results
from benchmarks.moe.transports import measure_transports
from benchmarks.moe.ways import ITEM, Way, make_ways
from coserve.workloads.provisioning import MoeShape

FULL, TINY = MoeShape(48, 2048, 768, 128, 8), MoeShape(2, 32, 16, 4, 2)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
IN_GRAPH, REPLAYS, SEED = 50, 9, 7
FILE = "ping_pong.json"


def exchanges(shape: MoeShape, tokens: int) -> list[tuple[int, int]]:
    """Return the elements that a layer's two exchanges send and get back."""
    sent, back = shape.hidden, shape.chosen * 2 * shape.inner
    return [(tokens * sent, tokens * back), (tokens * shape.chosen * shape.inner, tokens * shape.hidden)]


def beside_us(shape: MoeShape, tokens: int, bandwidth: float) -> tuple[float, float]:
    """Return the microseconds in which a layer's chosen experts are read: gate and up, down."""
    active = shape.active_pairs([1.0], tokens)
    down = 1e6 * active * ITEM * shape.hidden * shape.inner / bandwidth
    return 2 * down, down


def rank_main(rank: int, size: int, address: str, tiny: bool, found: Any) -> None:  # noqa: ANN401 - a queue
    """One process: measure each way at each number of tokens; rank 0 reports (way, tokens, times or an error)."""
    from coserve.model.parallel.symmetric import set_up_collectives

    device = torch.device("cpu") if tiny else torch.device("cuda", rank)
    if not tiny:
        set_up_collectives()
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if tiny else "cpu:gloo,cuda:nccl", init_method=address, rank=rank, world_size=size)
    shape, tokens = (TINY, (1, 3)) if tiny else (FULL, TOKENS)
    most = max(max(pair) for pair in exchanges(shape, tokens[-1]))
    ways = make_ways(most, rank ^ 1, device)
    _meet(device)  # their flags are zero
    for name, way in ways.items():
        for count in tokens:
            pairs = exchanges(shape, count)
            error = _agreed(partial(_check_all, way, rank, pairs, device))
            if rank == 0 and error:
                found.put((name, count, error))
            if error:
                break
            times = [_time(way, rank, sent, back, device) for sent, back in pairs]
            if rank == 0:
                found.put((name, count, times))
    found.put(None)
    _meet(device)


def _meet(device: torch.device) -> None:
    """Wait until every rank has come here with its GPU idle."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1))


def _agreed(check: Callable[[], None]) -> str:
    """Run on every rank; return the first error of any rank, or nothing."""
    try:
        check()
        own = ""
    except Exception as error:  # noqa: BLE001 - the other ways are still to measure
        own = f"{type(error).__name__}: {error}"[:300]
    errors = [""] * dist.get_world_size()
    dist.all_gather_object(errors, own)
    return next(filter(None, errors), "")


def _round(way: Way, rank: int, x: torch.Tensor, sent: int, back: int) -> None:
    """One exchange: even ranks send first."""
    if rank % 2 == 0:
        way.send(x[:sent])
        way.receive(back)
    else:
        way.receive(sent)
        way.send(x[:back])


def _drawn(seed: int, numbers: int, device: torch.device) -> torch.Tensor:
    return torch.randn(numbers, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


def _check_all(way: Way, rank: int, pairs: Sequence[tuple[int, int]], device: torch.device) -> None:
    for sent, back in pairs:
        _check(way, rank, sent, back, device)


def _check(way: Way, rank: int, sent: int, back: int, device: torch.device) -> None:
    """An exchange, three times, brings the numbers that the other rank has."""
    come = back if rank % 2 == 0 else sent
    for seed in range(3):
        x = _drawn(2 * seed + rank % 2, max(sent, back), device)
        _round(way, rank, x, sent, back)
        want = _drawn(2 * seed + 1 - rank % 2, max(sent, back), device)[:come]
        if not torch.equal(way.own[:come], want):
            raise RuntimeError("the numbers that arrived are not those that were sent")


def _time(way: Way, rank: int, sent: int, back: int, device: torch.device) -> float:
    """Return the microseconds of one exchange: the median of replays of a graph of `IN_GRAPH`."""
    x = torch.zeros(max(sent, back), dtype=torch.bfloat16, device=device)

    def many() -> None:
        for _ in range(IN_GRAPH):
            _round(way, rank, x, sent, back)

    run: Callable[[], object] = many
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            many()
        run = graph.replay
    spans = []
    for _ in range(REPLAYS + 2):
        _meet(device)
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        spans.append((time.perf_counter() - began) / IN_GRAPH)
    return 1e6 * statistics.median(spans[2:])


@dataclass
class Report:
    """Writes the rows of a run: one for each number of tokens, with all ways that were measured so far."""

    results: Results
    shape: MoeShape
    pairs: int
    bandwidth: float
    found: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    """By tokens and way, the microseconds of a layer's two exchanges."""

    def add(self, way: str, tokens: int, times: list[float] | str) -> None:
        """Take in one measurement, or the error of a way that failed."""
        if isinstance(times, str):
            self.results.put(f"infini.failed.{way}", 1, "failures", None, about={"error": times, "tokens": tokens})
            return
        ways = self.found.setdefault(tokens, {})
        ways[way] = [round(one, 2) for one in times]
        fastest = min(ways, key=lambda name: sum(ways[name]))
        beside = beside_us(self.shape, tokens, self.bandwidth)
        left = sum(max(0.0, one - base) for one, base in zip(ways[fastest], beside, strict=True))
        about = {
            "tokens": tokens,
            "way": fastest,
            "exchange_us": dict(ways),
            "exchange_bytes": [[ITEM * part for part in pair] for pair in exchanges(self.shape, tokens)],
            "products_us": [round(one, 2) for one in beside],
            "beside_ms": round(self.shape.layers * left / 1e3, 3),
        }
        key = f"infini.step_ms.t{tokens}" + ("" if self.pairs == 1 else f".pairs{self.pairs}")
        self.results.put(key, round(self.shape.layers * sum(ways[fastest]) / 1e3, 3), "ms", None, about=about)


def measure(report: Report, *, tiny: bool, limit: float) -> None:
    """Start the ranks, take what they measure, and end them after `limit` seconds."""
    context, size = multiprocessing.get_context("spawn"), 2 * report.pairs
    with tempfile.TemporaryDirectory() as folder:
        found = context.Queue()
        args = (size, f"file://{folder}/ranks", tiny, found)
        ranks = [context.Process(target=rank_main, args=(rank, *args), daemon=True) for rank in range(size)]
        for process in ranks:
            process.start()
        deadline, left = time.monotonic() + limit, size
        try:
            while left:
                one = found.get(timeout=max(0.0, deadline - time.monotonic()))
                if one is None:
                    left -= 1
                else:
                    report.add(*one)
        except Empty:
            report.add("late", 0, f"no answer of {left} ranks in {limit:.0f} s")
        finally:
            for process in ranks:
                process.kill()
                process.join()


def table(path: Path) -> str:
    """Return the rows of a result of one pair in Markdown, a line for each number of tokens."""
    rows = [row for key, row in json.loads(path.read_text())["rows"].items() if "way" in row and ".pairs" not in key]
    lines = [
        "| tokens | bytes of a layer | fastest way | first exchange, second | all layers | beside the products |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: int(row["tokens"])):
        size, times = sum(map(sum, row["exchange_bytes"])), row["exchange_us"][row["way"]]
        lines.append(
            f"| {row['tokens']} | {size:,} | {row['way']} | {times[0]:.1f} µs, {times[1]:.1f} µs "
            f"| {row['value']:.2f} ms | {row['beside_ms']:.2f} ms |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__, tiny="two processes on the CPU and a tiny shape, to try the script")
    parser.add_argument("--gpus", type=int, default=2, help="an even number: pairs that send at the same time")
    parser.add_argument("--bandwidth", type=float, default=3.35e12, help="bytes a second of the GPU's memory")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which it ends, whatever is missing")
    parser.add_argument("--table", action="store_true", help="print the table of --out's results, and measure nothing")
    parser.add_argument("--transports", action="store_true", help="time coserve's own: see `transports`")
    options = parser.parse_args()
    if options.table:
        print(table(options.out / FILE))
        return
    if options.gpus % 2:
        parser.error(f"--gpus: expected an even number, got {options.gpus}")
    shape = TINY if options.tiny else FULL
    results = Results.of(
        options, FILE, __file__, vars(shape) | {"gpus": options.gpus, "bandwidth": options.bandwidth}, seed=SEED
    )
    if options.transports:
        measure_transports(results, shape, (1, 3) if options.tiny else (1, 8, 64, 512, 4096), tiny=options.tiny)
        return
    report = Report(results, shape, options.gpus // 2, options.bandwidth)
    measure(report, tiny=options.tiny, limit=options.limit)


if __name__ == "__main__":
    main()
