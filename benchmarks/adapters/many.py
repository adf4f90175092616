"""Thousands of adapters over HTTP: throughput at saturation, the first token's time, and what a cold adapter adds.

    python -m benchmarks.adapters.many --out benchmarks/results [--host warm] [--without prefetch,overlap,pool]
    python -m benchmarks.adapters.many --shape 13b --host warm --out benchmarks/results
    python -m benchmarks.adapters.many --tiny --out /tmp/tried

The Llama-3.1-8B shape with random weights, default settings; adapters on q, k, v and o of rank 8 (S-LoRA's S1) or of
ranks 8, 16, 32 and 64 (S2), lengths uniform from 8 to 512 tokens, as in S-LoRA's table 3 and section 6.2: each
adapter's own Gamma arrivals of cv 1, popularity a power law of exponent 1, or uniform. Few files are real: the other
adapters are links to them, so all lie in the page cache, and each is loaded on its own. An adapter's first request
reads it; with `--host warm` all are read before the clock starts, as far as host memory holds them (S-LoRA, section
4.1: "we store all LoRA adapters in the main memory"), and the keys end in `.warm`. Each result has the numbers of
adapters in host memory and in the page cache, and the bytes a second that were read and copied; `floor_requests_s` is
how many adapters a second the link to the GPU carries (`adapter_steps.json`), which bounds uniform requests.
`--without`: S-LoRA's ablations, each with a daemon of its own (`ablation/`); the keys end in `.no_prefetch`,
`.no_overlap`, and `.no_pool` for memory apart for adapters, half of the pool's. `--shape 13b`: S-LoRA's S4, only `sat`.
`--cases 5.s1,2000.s1`: only these.

`sat`: arrivals beyond what is served; output tokens of the window from `SETTLED` seconds on, over the mean length of an
answer. `ttft`: 70% of that of 5 adapters; where `sat` has not measured it in the same run, of the committed result of
the same key, or of the one without an ending, as its row says. `cold`: one request at a time, of an adapter's first one
what is more than its second one, for an adapter in host memory and for one in the page cache (rank 16 on seven sites).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.adapters.cases import COLD_RANK, FULL, FULL_13B, REAL, SMALL, SMALL_13B, Case
from benchmarks.adapters.figures import draw_many
from benchmarks.adapters.fleet import (
    ablation,
    get,
    in_page_cache,
    link,
    llama_sites,
    load_seconds,
    resident,
    step_totals,
    wait_ready,
    warm,
    write_adapter,
)
from benchmarks.common.options import RESULTS, make_parser, names_of
from benchmarks.common.results import Results, Target
from benchmarks.serving.http_case import FIRST_TOKEN, SEED, model_folder
from benchmarks.serving.http_daemon import LoadProcesses, daemon, import_adapter, soon
from benchmarks.serving.http_load import LoadRequest
from coserve.core.types import AdapterRef
from coserve.lora.files.packed_header import PACKED_FILE
from coserve.state.folder import DataFolder
from coserve.workloads.arrivals import Arrivals, Process, arrival_times
from coserve.workloads.distributions import Popularity, Shape, shares
from coserve.workloads.replay import Sample

FILE, PARTS = "adapters_many.json", ("sat", "ttft", "cold", "uniform")
SETTLED = 4.0
"""Seconds; also of the requests before the first case, which are not measured."""
LOAD = 0.7
SATISFIED = 6.0
"""Seconds until the first token, in S-LoRA's attainment."""
TARGETS = {500: 0.98, 2000: 0.97, 5000: 0.94}


class Fleet:
    """The adapters of a running daemon: a few real ones, and links to them, made as they are needed."""

    def __init__(self, case: Case, data: Path, root: Path, url: str) -> None:
        self._data, self._root, self._url, self._linked = data, root, url, dict[str, int]()
        attention, all_sites = (llama_sites(case.config, mlp=mlp) for mlp in (False, True))
        self._real = {
            kind: [self._real_one(f"{kind}-real-{i}", attention, rank, i) for i, rank in enumerate(REAL[kind])]
            for kind in sorted({kind for _, _, kind in case.cases + case.uniform + (case.few,)})
        }
        if case.cold:
            self._real["cold"] = [self._real_one("cold-real", all_sites, COLD_RANK, 0)]
        time.sleep(2.0)  # their packed files are written beside all else

    def _real_one(self, name: str, sites: dict[str, Any], rank: int, seed: int) -> str:
        write_adapter(self._root / name, sites, rank, seed)
        import_adapter(self._url, name)
        return name

    def names(self, kind: str, count: int) -> list[str]:
        """The first `count` adapters of a kind."""
        have = self._linked.get(kind, 0)
        if count > have:
            link(self._data, self._real[kind], [f"{kind}-{i:05d}" for i in range(have, count)])
            self._linked[kind] = count
        return [f"{kind}-{i:05d}" for i in range(count)]

    def cached(self, kind: str, count: int) -> int:
        """How many of the first `count` lie in the page cache."""
        found = [in_page_cache(path) for path in self._packed(kind)]
        return sum(found[i % len(found)] for i in range(count))

    def bytes(self, kind: str) -> float:
        """Mean bytes of an adapter in memory."""
        return statistics.mean(path.stat().st_size for path in self._packed(kind))

    def _packed(self, kind: str) -> list[Path]:
        folder = DataFolder(self._data)
        return [folder.adapter(AdapterRef(name, 1)) / PACKED_FILE for name in self._real[kind]]


class Run:
    """The parts. Each result is written as soon as it is measured."""

    def __init__(
        self, case: Case, results: Results, fleet: Fleet, url: str, end: float, *, warm: bool, suffix: str
    ) -> None:
        """`end`: monotonic time after which no case is begun. `warm`: adapters are in host memory before it. `suffix`:
        of all keys but those of `cold`."""
        self._warm, self._suffix = warm, suffix
        self._case, self._results, self._fleet, self._url, self._end = case, results, fleet, url, end
        self._served = dict[tuple[int, float, str], float]()

    def sat(self) -> None:
        for key in self._case.cases:
            self._saturate(key)

    def uniform(self) -> None:
        for key in self._case.uniform:
            self._saturate(key)

    def _saturate(self, key: tuple[int, float, str]) -> None:
        assert time.monotonic() < self._end, f"no time left for {key}"
        count, exponent, kind = key
        case, names = self._case, self._names(kind, count)
        if not self._served:  # the daemon's first steps, which capture graphs, are of no case
            self._settle(case.rate)
        tiers = {
            "in_host_memory": len(resident(self._url, f"{kind}-") & set(names)),
            "in_page_cache": self._fleet.cached(kind, count),
        }
        before, steps_before = load_seconds(self._url), step_totals(self._url)
        samples = self._send(requests_of(case, names, exponent, case.rate), case.seconds)
        served, about = throughput(samples, case)
        steps, seconds, adapters = (b - a for a, b in zip(steps_before, step_totals(self._url), strict=True))
        if steps:
            about |= {"step_ms": round(1e3 * seconds / steps, 2), "step_adapters": round(adapters / steps, 1)}
        self._served[key] = served
        name = f"{count}.{'alpha1' if exponent else 'uniform'}.{kind}"
        about |= {"loads": (loads := _loads(before, load_seconds(self._url))), "health": _health(self._url)}
        size, link = self._fleet.bytes(kind), link_bytes_s()
        moved = {"read": loads["read"][0], "copied": loads["copy"][0]}
        about |= tiers | {f"{name}_gb_s": round(n * size / case.seconds / 1e9, 3) for name, n in moved.items()}
        about |= {"adapter_bytes": round(size), "floor_requests_s": None if link is None else round(link / size, 1)}
        target = Target(40.0) if key == (2000, 1, "s1") else None
        self._put(f"adapters.requests_s.{name}", round(served, 2), "requests/s", target, about=about)
        few = self._served.get(case.few)
        if few and kind == case.few[2] and exponent and key != case.few:
            target = Target(TARGETS[count]) if kind == "s1" and count in TARGETS else None
            end = "" if kind == "s1" else f".{kind}"
            self._put(f"adapters.flat.{count}{end}", round(served / few, 4), f"of {case.few[0]} adapters", target)
        same = self._served.get((count, exponent, "s1"))
        if kind == "s2" and same:
            self._put("adapters.s2_vs_s1", round(served / same, 4), "of S1", Target(0.9))

    def _names(self, kind: str, count: int) -> list[str]:
        """The first `count` adapters of a kind, in host memory if they shall be."""
        names = self._fleet.names(kind, count)
        if self._warm:
            warm(self._url, names, f"{kind}-")
        return names

    def _saturation(self) -> tuple[float, str]:
        """Requests a second at saturation with 5 adapters, and where the number is from."""
        if self._case.few in self._served:
            return self._served[self._case.few], "this run"
        plain = "adapters.requests_s.5.alpha1.s1"
        for key in (plain + self._suffix, plain) if self._case.size is FULL.size else ():
            if (row := committed(FILE, key)) is not None:
                return row["value"], f"{key} of {row['date']}"
        return 0.5 * self._case.rate, "a guess"

    def ttft(self) -> None:
        most = max(key[0] for key in self._case.cases if key[0] <= 2000)
        saturation, source = self._saturation()
        rate = LOAD * saturation
        if not self._served:
            self._settle(rate)
        found = dict[int, float]()
        for count in (5, most):
            names = self._names("s1", count)
            before = load_seconds(self._url)
            samples = self._send(requests_of(self._case, names, 1, rate), self._case.seconds, rest=3.0)
            waits = [each.times[0] - each.due for each in samples if each.times]
            found[count] = _quantile(waits, 0.95)
            about = {
                "rate": round(rate, 2),
                "saturation": round(saturation, 2),
                "saturation_from": source,
                "p50_ms": _ms(waits, 0.5),
                "requests": len(samples),
                "within_6_s": round(sum(wait <= SATISFIED for wait in waits) / len(samples), 4),
                "errors": _errors(samples),
                "loads": _loads(before, load_seconds(self._url)),
            }
            self._put(f"adapters.ttft_p95_ms.{count}", round(1e3 * found[count], 1), "ms", about=about)
        self._put(
            f"adapters.ttft_ratio.{most}",
            round(found[most] / found[5], 3),
            "of 5 adapters",
            Target(1.3, True),
        )

    def _settle(self, rate: float) -> None:
        """Send requests that are not measured."""
        first = replace(self._case, seconds=SETTLED)
        self._send(requests_of(first, self._names(self._case.few[2], self._case.few[0]), 1, rate), SETTLED, rest=3.0)

    def _put(
        self, key: str, value: float, unit: str, target: Target | None = None, about: dict[str, Any] | None = None
    ) -> None:
        self._results.put(key + self._suffix, value, unit, target, about=about or {})

    def cold(self) -> None:
        names = self._fleet.names("cold", 2 * self._case.cold)
        on_host, on_disk = names[: self._case.cold], names[self._case.cold :]
        warm(self._url, on_host, "cold-0")
        chance, before = random.Random(SEED), load_seconds(self._url)
        order = [name for pair in zip(on_host, on_disk, strict=True) for name in pair for _ in range(2)]
        requests = [
            LoadRequest(
                index=i, prompt=[chance.randrange(FIRST_TOKEN, 4096) for _ in range(64)], max_tokens=4, adapter=name
            )
            for i, name in enumerate(order)
        ]
        samples = LoadProcesses(1).run(self._url, requests, start=soon(), streams=1)
        first = {each.adapter: 1e3 * (each.times[0] - each.sent) for each in samples[::2]}
        again = {each.adapter: 1e3 * (each.times[0] - each.sent) for each in samples[1::2]}
        loads = _loads(before, load_seconds(self._url))
        for tier, of, most in (("host", on_host, 3.0), ("disk", on_disk, 25.0)):
            added = [first[name] - again[name] for name in of]
            about = {"warm_ttft_ms": round(statistics.median(again[name] for name in of), 2), "loads": loads}
            key = f"adapters.cold_ms.{tier}"
            self._results.put(
                key, round(statistics.median(added), 2), "ms added to TTFT", Target(most, True), added, about
            )

    def _send(self, requests: Sequence[LoadRequest], seconds: float, rest: float = 0.3) -> list[Sample]:
        """What is not answered `rest` seconds after the last arrival is cut off."""
        return LoadProcesses(self._case.processes).run(self._url, requests, start=soon(), until=seconds + rest)


def requests_of(case: Case, names: Sequence[str], exponent: float, rate: float) -> list[LoadRequest]:
    """S-LoRA's trace: each adapter's own Gamma arrivals, its share by a power law of this exponent."""
    chance, found = random.Random(f"{SEED}/{len(names)}/{exponent}/{rate}"), list[tuple[float, str]]()
    of_each = shares(Popularity(Shape.POWER_LAW, exponent), len(names))
    for name, share in zip(chance.sample(names, len(names)), of_each, strict=True):
        arrivals = Arrivals(process=Process.GAMMA, rate=rate, cv=1.0)
        found += [(at, name) for at in arrival_times(arrivals, case.seconds, chance, share=share)]
    longest, vocab = case.longest, case.config["vocab_size"]
    return [
        LoadRequest(
            index=i,
            prompt=[chance.randrange(FIRST_TOKEN, vocab) for _ in range(chance.randint(8, longest))],
            max_tokens=chance.randint(8, longest),
            adapter=name,
            at=at,
        )
        for i, (at, name) in enumerate(sorted(found))
    ]


def throughput(samples: Sequence[Sample], case: Case) -> tuple[float, dict[str, Any]]:
    """Requests that are served a second: output tokens of the window over the mean length of an answer; and fields of
    the row. A chunk counts as the mean number of tokens of its answer's chunks. `within_6_s`: the share of requests due
    `SATISFIED` seconds before the end whose first token came in that time."""
    window = case.seconds - SETTLED
    tokens = sum(
        sum(SETTLED <= at < case.seconds for at in each.times) * each.tokens / len(each.times)
        for each in samples
        if each.times
    )
    gaps = [gap for each in samples for gap in itertools.starmap(lambda a, b: b - a, itertools.pairwise(each.times))]
    judged = [each for each in samples if each.due < case.seconds - SATISFIED]
    satisfied = sum(bool(each.times) and each.times[0] - each.due <= SATISFIED for each in judged)
    about = {
        "output_tok_s": round(tokens / window, 1),
        "within_6_s": round(satisfied / len(judged), 4) if judged else None,
        "tpot_p50_ms": _ms(gaps, 0.5),
        "tpot_p99_ms": _ms(gaps, 0.99),
        "errors": _errors(samples),
    }
    return tokens / window / ((8 + case.longest) / 2), about


def daemon_settings(root: Path, model: Path, case: Case) -> dict[str, object]:
    """Defaults, with a queue for all that arrives."""
    served = {"model": model, "data_dir": root / "data", "data_root": root, "device": case.size.device}
    return served | {"load_format": "dummy", "max_queue": 4096, "shed": "off", "max_connections": 4096}


def committed(file: str, key: str) -> dict[str, Any] | None:
    """The row of a committed result; None: not measured."""
    path = RESULTS / file
    found: dict[str, Any] | None = json.loads(path.read_text())["rows"].get(key) if path.exists() else None
    return found


def link_bytes_s() -> float | None:
    """Bytes a second of copies from pinned memory to the GPU, as committed; None: not measured."""
    row = committed("adapter_steps.json", "adapters.copy_added_ms.beside")
    return None if row is None else 1e3 * float(row["bytes"]) / float(row["copy_ms"])


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _ms(values: Sequence[float], share: float) -> float | None:
    return round(1e3 * _quantile(values, share), 1) if values else None


def _errors(samples: Sequence[Sample]) -> dict[str, int]:
    """Numbers by code. `TimeoutError`: cut off at the end."""
    codes = [each.error for each in samples if each.error is not None]
    return {code: codes.count(code) for code in sorted(set(codes))}


def _loads(before: dict[str, tuple[float, float]], after: dict[str, tuple[float, float]]) -> dict[str, list[float]]:
    """Loads and seconds by cause, in between."""
    none = (0.0, 0.0)
    return {
        cause: [count - before.get(cause, none)[0], round(seconds - before.get(cause, none)[1], 3)]
        for cause, (count, seconds) in after.items()
    }


def _health(url: str) -> dict[str, Any]:
    found = json.loads(get(f"{url}/health"))
    return {name: found[name] for name in ("adapters_resident", "host_adapter_bytes", "host_adapter_limit", "notes")}


def main() -> None:
    parser = make_parser(__doc__, tiny="a small base, on any machine, to try the script")
    parser.add_argument("--shape", choices=("8b", "13b"), default="8b", help="13b: S-LoRA's setting S4")
    parser.add_argument("--only", type=names_of(PARTS), help=f"parts: {', '.join(PARTS)}; of 13b sat")
    parser.add_argument("--cases", default=None, help="of sat, separated by commas, such as 2000.s1; else all")
    parser.add_argument("--budget", type=float, default=290.0, help="seconds after which no case is begun")
    parser.add_argument("--host", choices=("cold", "warm"), default="cold", help="warm: adapters are in host memory")
    parser.add_argument("--host-adapter-bytes", type=int, default=None, help="the daemon's setting")
    parser.add_argument("--without", default="", help="ablations, separated by commas: prefetch, overlap, pool")
    parser.add_argument("--plot", action="store_true", help="draw the figure of the results in --out, and stop")
    options = parser.parse_args()
    if options.plot:
        draw_many(options.out)
        return
    large = options.shape == "13b"
    case = (SMALL_13B if large else SMALL) if options.tiny else (FULL_13B if large else FULL)
    if options.cases is not None:
        case = replace(
            case, cases=tuple(each for each in case.cases if f"{each[0]}.{each[2]}" in options.cases.split(","))
        )
    parts = options.only or (["sat"] if large else PARTS)
    settings = {"cases": case.cases, "rate": case.rate, "seconds": case.seconds, "longest": case.longest}
    real = {"real_files": f"of ranks {REAL}, 1 of cold; the others are links to them, all in the page cache"}
    results = Results.of(options, FILE, __file__, settings | real, seed=SEED)
    failed, end = dict[str, str](), time.monotonic() + options.budget
    with tempfile.TemporaryDirectory() as caches:
        os.environ.setdefault("COSERVE_CACHE_DIR", caches)  # daemons share what they compile
        for without in options.without.split(","):
            failed |= measure(case, parts, results, options, without, end)
    results.put("adapters.failed_parts", len(failed), "parts", about={"errors": failed})


def measure(
    case: Case,
    parts: Sequence[str],
    results: Results,
    options: argparse.Namespace,
    without: str,
    end: float,
) -> dict[str, str]:
    """Measure the parts with a daemon; return the errors of those that failed. `without`: an ablation, or nothing;
    `end`: monotonic time after which nothing is begun."""
    failed, began = dict[str, str](), time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        served = daemon_settings(root, model_folder(root / "model", case.size), case)
        if options.host_adapter_bytes is not None:
            served["host_adapter_bytes"] = options.host_adapter_bytes
        with daemon(served, root / "log.txt", **ablation(__file__, without)) as url:
            wait_ready(url, end)
            print(f"{time.monotonic() - began:.0f} s: the daemon is ready", flush=True)
            fleet, warm_host = Fleet(case, root / "data", root, url), options.host == "warm"
            suffix = (".warm" if warm_host else "") + (f".no_{without}" if without else "")
            run = Run(case, results, fleet, url, end, warm=warm_host, suffix=suffix)
            for part in parts:
                work: Callable[[], None] = getattr(run, part)
                try:
                    assert time.monotonic() < end, "no time left"
                    work()
                except Exception:  # noqa: BLE001 - the other parts are measured
                    failed[part + suffix] = traceback.format_exc()[-2000:]
                    print(failed[part + suffix], flush=True)
                print(f"{time.monotonic() - began:.0f} s: {part}{suffix} is over", flush=True)
    return failed


if __name__ == "__main__":
    main()
