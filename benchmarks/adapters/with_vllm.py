"""coserve and vLLM with 500 adapters at saturation, on the traces of `many.py`, one after the other on one GPU.

    python -m benchmarks.adapters.with_vllm --vllm-site /tmp/site --out benchmarks/results
    python -m benchmarks.adapters.with_vllm --only vllm --vllm-strong --max-loras 256 \
        --vllm-option lora-target-modules=qkv_proj,o_proj --vllm-site /tmp/site --out benchmarks/results

The Llama-3.1-8B shape with random weights, adapters of rank 8 on q, k, v and o; popularity a power law of exponent 1
(`alpha1`), or uniform. Both get the same trace files through `/v1/completions` from the same clients, without a prefix
cache, and have all adapters in host memory before: vLLM by `--max-cpu-loras 500` and `--lora-modules` at its start,
coserve by prefetches. Before the clock starts each serves `SETTLED` seconds of such requests.

`--max-loras`, vLLM's places on the GPU, each measured with a server of its own: a request waits while other adapters
have them all, and vLLM's kernels launch for every place in each step, or with `--vllm-strong` (both streams, kernels
for each number of active adapters) for the active ones. Without `--vllm-option lora-target-modules=qkv_proj,o_proj` its
products of adapters run at the MLP's sites too, with zeros.

`requests_s` is as in `many.py`; keys of vLLM end in `.lPLACES`, and with `--vllm-strong` in `.strong`; its rows have
versions, flags and environment. `vs_vllm` is coserve's over the best of vLLM's that this commit has in `--out`.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.adapters.cases import FULL, S1, SMALL, Case
from benchmarks.adapters.fleet import link, llama_sites, resident, warm, write_adapter
from benchmarks.adapters.many import FILE, SETTLED, daemon_settings, requests_of, throughput
from benchmarks.common.options import add_names, make_parser
from benchmarks.common.results import Results
from benchmarks.peers.client import base_name, replay_prompts
from benchmarks.peers.systems import Place, peer_about, serving, vllm
from benchmarks.serving.http_case import SEED, model_folder
from benchmarks.serving.http_daemon import import_adapter
from coserve.workloads.replay import Sample
from coserve.workloads.scenario import Scenario
from coserve.workloads.trace import PromptArrival, Trace, save_trace

REAL = tuple(f"real-{i}" for i in range(4))
"""Adapters with files of their own; the others are links to them."""
PREFIX = "s1"
POPULARITIES = {"alpha1": 1, "uniform": 0}


@dataclass(frozen=True)
class Comparison:
    """`scenario`: has the names of all adapters. `places`: vLLM's numbers of adapters on the GPU, one server each."""

    case: Case
    place: Place
    scenario: Scenario
    results: Results
    places: Sequence[int]

    async def coserve(self) -> None:
        root, names = self.place.scratch, self.scenario.adapter_names
        async with serving(daemon_settings(root, self.place.model, self.case), root / "coserve.log") as url:
            await asyncio.to_thread(self._link, url)
            await asyncio.to_thread(warm, url, names, f"{PREFIX}-")
            held = len(await asyncio.to_thread(resident, url, f"{PREFIX}-"))
            await self._measure(url, await base_name(url), "coserve", {"in_host_memory": held})

    def _link(self, url: str) -> None:
        for name in REAL:
            import_adapter(url, name)
        time.sleep(2.0)  # their packed files are written beside all else
        link(self.place.scratch / "data", REAL, self.scenario.adapter_names)

    async def vllm(self) -> None:
        for i, name in enumerate(self.scenario.adapter_names):
            (self.place.adapters / name).symlink_to(self.place.scratch / REAL[i % len(REAL)])
        for places in self.places:
            place = replace(self.place, more={"max-loras": (str(places),)} | dict(self.place.more))
            async with vllm(place, self.scenario, memory=place.vllm_memory) as url:
                print(f"vLLM answers, with {places} places", flush=True)
                ending = f".l{places}" + ".strong" * place.strong
                about = peer_about(place, self.scenario, memory=place.vllm_memory)
                await self._measure(url, "base", "vllm", about, ending)

    async def _measure(self, url: str, model: str, system: str, about: Mapping[str, object], ending: str = "") -> None:
        """Serve requests that are not measured, then each popularity. `ending`: of the keys."""
        await self._replay(url, model, replace(self.case, seconds=SETTLED), POPULARITIES["alpha1"])
        for popularity, exponent in POPULARITIES.items():
            served, found = throughput(await self._replay(url, model, self.case, exponent), self.case)
            which = f"{self.scenario.adapters}.{popularity}"
            key = f"adapters.{system}.requests_s.{which}{ending}"
            self.results.put(key, round(served, 2), "requests/s", about=found | dict(about))
            self._compare(which)

    def _compare(self, which: str) -> None:
        """Put coserve's requests over those of vLLM's best row, where this commit has both."""
        ours = self.results.row(f"adapters.coserve.requests_s.{which}")
        found = {key: self.results.row(key) for key in sorted(self.results.keys())}
        start = f"adapters.vllm.requests_s.{which}."
        rows = {key: row["value"] for key, row in found.items() if row is not None and key.startswith(start)}
        if ours is None or not any(rows.values()):
            return
        best = max(rows, key=rows.__getitem__)
        both = {"coserve": ours["value"], "vllm": rows[best], "vllm_key": best}
        ratio = round(ours["value"] / rows[best], 4)
        self.results.put(f"adapters.vs_vllm.{which}", ratio, "of vLLM's requests/s", about=both)

    async def _replay(self, url: str, model: str, case: Case, exponent: float) -> Sequence[Sample]:
        path = self.place.scratch / "trace.jsonl"
        arrivals = [
            PromptArrival(
                at=each.at,
                index=each.index,
                adapter=each.adapter,
                prompt=tuple(each.prompt),
                max_tokens=each.max_tokens,
                seed=each.index,
            )
            for each in requests_of(case, self.scenario.adapter_names, exponent, case.rate)
        ]
        save_trace(Trace(replace(self.scenario, duration=case.seconds), arrivals), path)
        run, _ = await replay_prompts(url, model, path, case.processes, {})
        return run.samples


def comparison(root: Path, options: argparse.Namespace, results: Results) -> Comparison:
    """Write the base and the real adapters."""
    case = SMALL if options.tiny else FULL
    size = case.size
    for i, name in enumerate(REAL):
        write_adapter(root / name, llama_sites(case.config, mlp=False), S1[0], i)
    (root / "adapters").mkdir()
    count = case.uniform[0][0]
    more = {name: values.split(",") for name, _, values in (each.partition("=") for each in options.vllm_option)}
    model = model_folder(root / "model", size)
    place = Place(size, model, root / "adapters", root, options.vllm_site, strong=options.vllm_strong, more=more)
    places = sorted({min(int(each), count) for each in options.max_loras.split(",")})
    scenario = Scenario(adapters=count, rank=S1, adapter_prefix=PREFIX, seed=SEED, rate=case.rate, temperature=0.0)
    return Comparison(case, place, scenario, results, places)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, tiny="a small base, on any machine, to try the script")
    add_names(parser, "--only", ("coserve", "vllm"), what="systems")
    parser.add_argument("--vllm-site", type=Path, default=None, help="folder with vLLM and what it needs")
    parser.add_argument("--vllm-strong", action="store_true", help="vLLM's settings for LoRA that are off by default")
    parser.add_argument("--max-loras", default="32", help="vLLM's places on the GPU, such as 32,64; a server for each")
    parser.add_argument("--vllm-option", action="append", default=[], help="NAME=VALUE,VALUE: one more option of vLLM")
    return parser.parse_args(given)


def main() -> None:
    options = parse()
    case = SMALL if options.tiny else FULL
    results = Results.of(
        options,
        FILE,
        __file__,
        {"rate": case.rate, "seconds": case.seconds, "longest": case.longest, "rank": S1[0]},
        seed=SEED,
    )
    with tempfile.TemporaryDirectory() as scratch:
        compared, began = comparison(Path(scratch), options, results), time.monotonic()
        for system in options.only:
            asyncio.run(compared.coserve() if system == "coserve" else compared.vllm())
            print(f"{time.monotonic() - began:.0f} s: {system} is over", flush=True)


if __name__ == "__main__":
    main()
