"""What happens as adapters come and go: a cache for a share of them, a thousand reloads, new versions beside requests.

    python -m benchmarks.adapters.tiers --out benchmarks/results [--only ratio,reloads,publish]
    python -m benchmarks.adapters.tiers --tiny --out /tmp/tried

The Llama-3.1-8B shape with random weights, adapters of rank 16 on seven sites (84 MB), files in the page cache.

`ratio`: InfiniLoRA's figure 5. The page pool holds the KV cache of `RUNNING` requests and a share of the adapters, all
of which are in host memory; popularity is a power law of exponent 1.2. A daemon for each share, all of them
on the GPU, of which those that wait use no time of it. `reloads`: one request
at a time, each for an adapter that has left the host and the pages since its last one; what the daemon's processes
take after the reloads, less what they take after a tenth of them. `publish`: one request streams while a new version of
another adapter is loaded again and again (`/v1/load_lora_adapter`); the longest time between two tokens less the
median one, in the median of the publications, is at most the time that the engine spends on it.
"""

from __future__ import annotations

import os
import random
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.adapters.figures import draw_ratio
from benchmarks.adapters.fleet import link, llama_sites, load_seconds, post, wait_ready, warm, write_adapter
from benchmarks.common.options import add_names, make_parser
from benchmarks.common.results import Results, Target
from benchmarks.serving.http_case import FIRST_TOKEN, LLAMA_8B, SEED, TINY, model_folder
from benchmarks.serving.http_case import FULL as FULL_SIZE
from benchmarks.serving.http_case import SMALL as SMALL_SIZE
from benchmarks.serving.http_daemon import LoadProcesses, daemon, import_adapter, soon
from benchmarks.serving.http_load import LoadRequest
from coserve.workloads.distributions import Popularity, Shape, choices

RANK, RUNNING, LENGTH = 16, 64, 256
"""Requests that the KV cache has room for, and tokens of a prompt and of an answer."""
EXPONENT, START = 1.2, 240.0
"""Of the popularity; seconds after which a daemon that is not ready is given up."""


@dataclass(frozen=True)
class Case:
    """Sizes of the run. `token_bytes`: of the KV cache; `page_tokens`: of the daemon."""

    config: dict[str, Any]
    device: str
    adapters: int
    shares: tuple[float, ...]
    rate: float
    seconds: float
    length: int
    reloads: int
    publications: int
    adapter_bytes: int
    token_bytes: int


FULL = Case(LLAMA_8B, "cuda", 100, (0.1, 0.3, 0.5, 1.0), 20, 20, LENGTH, 1000, 20, 83_886_080, 131_072)
SMALL = Case(TINY, "cpu", 10, (0.3, 1.0), 4, 4, 16, 40, 3, 120_000, 512)


class Bench:
    """The parts, each with daemons of its own."""

    def __init__(self, case: Case, results: Results, root: Path) -> None:
        self._case, self._results, self._root = case, results, root
        self._model = model_folder(root / "model", SMALL_SIZE if case.device == "cpu" else FULL_SIZE)
        write_adapter(root / "real", llama_sites(case.config, mlp=True), RANK, 0)
        self._names = [f"a-{i:05d}" for i in range(case.adapters)]

    @contextmanager
    def _daemon(self, name: str, **settings: object) -> Iterator[str]:
        data = self._root / name
        served = {"model": self._model, "data_dir": data, "data_root": self._root, "device": self._case.device}
        served |= {"load_format": "dummy", "shed": "off"}
        with daemon(served | settings, self._root / f"{name}.txt") as url:
            wait_ready(url, time.monotonic() + START)
            import_adapter(url, "real")
            self._send(url, ["real"])  # its packed file is written
            time.sleep(2.0)
            link(data, ["real"], self._names)
            yield url

    def ratio(self) -> None:
        case = self._case
        few = {"max_running": RUNNING, "micro_batch_tokens": 512, "max_active_jobs": 1}  # all fit on the GPU
        with ExitStack() as stack:

            def started(share: float) -> str | None:
                adapters = share * case.adapters * case.adapter_bytes / case.token_bytes
                pool = int(RUNNING * 2 * case.length + adapters)
                try:
                    url = stack.enter_context(self._daemon(f"ratio-{share}", kv_tokens=pool, **few))
                    warm(url, self._names, "a-")
                except (OSError, SystemExit) as error:  # the others are measured
                    print(f"{share:.0%}: {error!r}", flush=True)
                    return None
                return url

            urls = [started(case.shares[0])]  # the others load what it compiles
            with ThreadPoolExecutor() as together:
                urls += together.map(started, case.shares[1:])
            for share, url in zip(case.shares, urls, strict=True):
                if url is not None:
                    self._measure_ratio(share, url)

    def _measure_ratio(self, share: float, url: str) -> None:
        case, before, chance = self._case, load_seconds(url), random.Random(SEED)
        count = int(case.rate * case.seconds)
        chosen = choices(Popularity(Shape.POWER_LAW, EXPONENT), case.adapters, chance)
        at = sorted(chance.uniform(0, case.seconds) for _ in range(count))
        samples = self._send(url, [self._names[next(chosen)] for _ in at], at)
        waits = sorted(each.times[0] - each.due for each in samples if each.times)
        copies = load_seconds(url)["copy"][0] - before["copy"][0]
        about = {"p50_ms": round(1e3 * statistics.median(waits), 1), "copies": copies, "requests": count}
        about |= {"served": len(waits), "within_250_ms": round(sum(wait <= 0.25 for wait in waits) / count, 4)}
        key = f"adapters.ratio.ttft_p95_ms.{share:.0%}"
        self._results.put(key, round(1e3 * waits[int(0.95 * len(waits))], 1), "ms", about=about)

    def reloads(self) -> None:
        case = self._case
        size, length = case.adapter_bytes, 2 * case.length
        pool = int(2 * length + 2 * size / case.token_bytes)
        with self._daemon("reloads", kv_tokens=pool, max_running=1, host_adapter_bytes=max(4 << 20, 3 * size)) as url:
            sizes, reads = list[float](), load_seconds(url)
            for first, end in ((0, case.reloads // 10), (case.reloads // 10, case.reloads)):
                self._send(url, [self._names[i % len(self._names)] for i in range(first, end)], tokens=2)
                sizes.append(memory_mb())
            now = load_seconds(url)
            about = {"mb": sizes, "reads": sum(now[cause][0] - reads[cause][0] for cause in ("read", "pack"))}
        growth = (sizes[1] - sizes[0]) / sizes[0]
        key, target = f"adapters.reloads.{case.reloads}", Target(0.01, True)
        self._results.put(key, round(growth, 4), "growth", target, about=about)

    def publish(self) -> None:
        case, times = self._case, list[float]()
        with self._daemon("publish") as url:
            stream = threading.Thread(target=lambda: times.extend(self._stream(url)))
            stream.start()
            spans, body = list[tuple[float, float]](), {"lora_name": "live", "lora_path": "real", "load_inplace": True}
            for _ in range(case.publications):
                began = time.monotonic()
                post(f"{url}/v1/load_lora_adapter", body)
                spans.append((began, time.monotonic()))
                time.sleep(0.05)
            stream.join()
        gaps = [(b, b - a) for a, b in pairwise(times)]
        usual = statistics.median(gap for _, gap in gaps)
        added = [
            1e3 * (max((gap for at, gap in gaps if first <= at <= end + 0.05), default=usual) - usual)
            for first, end in spans
            if first < times[-1]
        ]
        about = {"usual_ms": round(1e3 * usual, 2), "published": len(added)}
        self._results.put(
            "adapters.publish_ms",
            round(statistics.median(added), 2),
            "ms of a step's delay",
            Target(10, True),
            added,
            about,
        )

    def _stream(self, url: str) -> list[float]:
        """Arrival of each token of one long request, on the monotonic clock."""
        start = soon()
        [sample] = LoadProcesses(1).run(url, [self._request(0, "real", 900)], start=start, streams=1)
        return [start + at for at in sample.times]

    def _send(self, url: str, names: Sequence[str], at: Sequence[float] = (), tokens: int | None = None) -> list[Any]:
        """One after another, or at the times `at`."""
        requests = [
            self._request(i, name, tokens or self._case.length, at[i] if at else 0.0) for i, name in enumerate(names)
        ]
        until = {"until": self._case.seconds + 10} if at else {}
        return LoadProcesses(1).run(url, requests, start=soon(), streams=None if at else 1, **until)

    def _request(self, i: int, name: str, tokens: int, at: float = 0.0) -> LoadRequest:
        chance = random.Random(f"{SEED}/{i}")
        vocab = self._case.config["vocab_size"]
        prompt = [chance.randrange(FIRST_TOKEN, vocab) for _ in range(min(64, self._case.length))]
        return LoadRequest(index=i, prompt=prompt, max_tokens=tokens, adapter=name, at=at)


def memory_mb() -> float:
    """MiB of this process's descendants: the daemon's processes."""
    total, waiting = 0.0, [os.getpid()]
    while waiting:
        children = Path(f"/proc/{(own := waiting.pop())}/task/{own}/children").read_text().split()
        for child in children:
            found = re.search(r"^VmRSS:\s+(\d+)", Path(f"/proc/{child}/status").read_text(), re.MULTILINE)
            total += int(found[1]) / 1024 if found else 0.0
        waiting += map(int, children)
    return round(total, 1)


def main() -> None:
    parser = make_parser(__doc__, tiny="a small base, on any machine, to try the script")
    add_names(parser, "--only", ("ratio", "reloads", "publish"))
    parser.add_argument("--plot", action="store_true", help="draw the figure of the results in --out, and stop")
    options = parser.parse_args()
    if options.plot:
        draw_ratio(options.out)
        return
    case = SMALL if options.tiny else FULL
    results = Results.of(
        options,
        "adapter_tiers.json",
        __file__,
        {"adapters": case.adapters, "rate": case.rate, "seconds": case.seconds, "running": RUNNING},
        seed=SEED,
    )
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.setdefault("COSERVE_CACHE_DIR", f"{scratch}/cache")  # daemons share what they compile
        bench = Bench(case, results, Path(scratch))
        for part in options.only:
            began = time.monotonic()
            getattr(bench, part)()
            print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
