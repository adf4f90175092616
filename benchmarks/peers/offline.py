"""Offline generation, coserve beside vLLM 0.26: tokens a second of the same loads, one engine at a time on one GPU.

    python -m benchmarks.peers.offline --vllm-site /tmp/site --budget 590 --out benchmarks/results
    python -m benchmarks.peers.offline --only vllm-strong --adapters 1,32 --vllm-site /tmp/site --out benchmarks/results
    TRITON_INTERPRET=1 python -m benchmarks.peers.offline --tiny --only coserve --out /tmp/tried

The sides, each in a process of its own, called in process: `vllm`; `vllm-strong`, with its settings for LoRA that are
off by default (both streams, kernels for each number of active adapters); `coserve`. The Llama-3.1-8B shape with random
weights, adapters of rank 16 on all seven sites of a layer, CUDA graphs, no prefix cache, greedy, every request to its
last token. All get the same token ids. `512x128`: 512 requests of 512 tokens that get 128 more; `decode.bN`: N requests
of 16 tokens that get 256 more. `.a0`, `.a1`, `.a32`: without adapters, one, 32 in turn; `decode.b1.a32` is one request
with one of 32 adapters on the GPU. Each load is warmed up by up to 256 of its requests.

Keys: `serving.tok_s.SIDE.LOAD`, output tokens a second; `serving.start_s.SIDE`, from the process' start to the first
answer; `serving.vs_vllm26.LOAD`, coserve's over the better of vLLM's two, once all three are there at one commit (for
`decode.b1.a1` also over vLLM's `decode.b1.a32`). Rows are written as they are measured. `--only` goes on in the same
file; `--only ""` measures nothing: the ratios of sides that two GPUs measured at once, once their files are merged.
Seconds of an H200 with cold caches: coserve 180, vllm 300, vllm-strong more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import results as common_results
from benchmarks.common.options import add_names, make_parser
from benchmarks.common.results import Results, Target
from benchmarks.peers.processes import found_by
from benchmarks.peers.systems import STAND_INS, peer_versions, vllm_environment
from benchmarks.serving.http_case import LLAMA_8B, RANK, SEED, adapter_folders

FILE = "offline.json"
VLLM = ("vllm", "vllm-strong")
SIDES = (*VLLM, "coserve")
VERSION = "0.26"
"""vLLM's, which the keys name."""
REGISTERED = (0, 1, 32)
"""Adapters that the engine has, load by load."""
ENGINE = Path(__file__).with_name("vllm_engine.py")
OVERTIME = 30.0
"""Seconds after the budget in which a load that was begun may end."""
TARGETS = {
    "512x128.a0": 1.15,
    "512x128.a1": 1.3,
    "512x128.a32": 1.75,
    "decode.b64.a0": 1.25,
    "decode.b64.a1": 1.4,
    "decode.b64.a32": 3.1,
    "decode.b32.a32": 3.0,
    "decode.b1.a0": 1.2,
    "decode.b1.a1": 1.35,
}


@dataclass(frozen=True)
class Load:
    """Requests that come all at once. `adapters`: that they use, in turn; `registered`: that the engine has."""

    name: str
    requests: int
    prompt: int
    output: int
    adapters: int
    registered: int
    repeats: int = 2

    def given(self, tiny: bool) -> dict[str, Any]:
        """What an engine's process is told; `tiny`: what Triton's interpreter runs in seconds."""
        told = asdict(self)
        if tiny:
            told |= {"requests": min(self.requests, 2), "prompt": 8, "output": 2}
            told |= {name: min(told[name], 2) for name in ("adapters", "registered")} | {"repeats": 1}
        return told | {"warm": {"requests": min(told["requests"], 256), "output": min(told["output"], 32)}}


def loads(registrations: Sequence[int] = REGISTERED) -> list[Load]:
    """Without adapters first, then with one: vLLM is faster with one of 32 than with the only one."""
    found = list[Load]()
    for registered in registrations:
        for sequences in (1, 32, 64):
            used = min(sequences, registered)
            found.append(Load(f"decode.b{sequences}.a{registered}", sequences, 16, 256, used, registered))
        found.append(Load(f"512x128.a{registered}", 512, 512, 128, registered, registered))
    return found


def plain_arguments(sequences: int, context: int) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for random weights and so many sequences at once, besides its model."""
    return {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": SEED,
        "max_num_seqs": sequences,
        "max_model_len": context,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.9,
    }


def engine_arguments(strong: bool) -> dict[str, Any]:
    """Arguments of `vllm.LLM`, besides its model."""
    return (
        plain_arguments(256, LLAMA_8B["max_position_embeddings"])
        | {
            "attention_backend": "FLASH_ATTN",
            "enable_lora": True,
            "max_loras": 32,
            "max_cpu_loras": 32,
            "max_lora_rank": RANK,
        }
        | ({"specialize_active_lora": True} if strong else {})
    )


def offline_environment(strong: bool) -> dict[str, str]:
    return vllm_environment(strong) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def vllm_process(
    given: dict[str, Any], site: Path | None, environment: dict[str, str], limit: float
) -> Iterator[dict[str, Any]]:
    """What `vllm_engine.py` tells, from a process that finds vLLM's packages and none of the repository's."""
    path = [str(each) for each in (site, STAND_INS) if each is not None]
    own = environment | {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}
    return found_by([sys.executable, str(ENGINE), json.dumps(given)], own, limit)


@dataclass(frozen=True)
class Comparison:
    """`until`: of `time.time()`, after which no load is begun."""

    results: Results
    site: Path | None
    scratch: Path
    until: float
    loads: Sequence[Load]
    tiny: bool

    def measure(self, side: str) -> None:
        left = [load.name for load in self.loads]
        for found in self._told(side):
            if "start_s" in found:
                self.results.put(f"serving.start_s.{side.replace('-', '_')}", found["start_s"], "s")
                continue
            name, speeds = found["load"], found["tok_s"]
            speed = round(statistics.median(speeds), 1)
            self.results.put(speed_key(side, name), speed, "output tok/s", values=speeds)
            left.remove(name)
        if left:
            print(f"{side}: no time was left for", *left, flush=True)

    def _told(self, side: str) -> Iterator[dict[str, Any]]:
        given = {"loads": [load.given(self.tiny) for load in self.loads], "seed": SEED, "until": self.until}
        given |= {"began": time.time()}
        limit = self.until + OVERTIME - time.time()
        if side == "coserve":
            command = [sys.executable, "-m", "benchmarks.peers.coserve_engine", json.dumps(given | {"tiny": self.tiny})]
            return found_by(command, {}, limit)
        strong, model = side == "vllm-strong", self.scratch / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(LLAMA_8B))
        folder = self.scratch / "adapters"
        folders = sorted(folder.iterdir()) if folder.exists() else adapter_folders(folder, LLAMA_8B)
        given |= {"engine": engine_arguments(strong) | {"model": str(model)}, "adapters": [*map(str, folders)]}
        return vllm_process(given | {"began": time.time()}, self.site, offline_environment(strong), limit)


def speed_key(side: str, load: str) -> str:
    return f"serving.tok_s.{side.replace('-', '_')}.{load}"


def put_ratios(results: Results) -> None:
    """The rows of coserve against vLLM for which all sides are there at this commit."""
    for load in (load.name for load in loads()):
        names = [speed_key(side, load) for side in SIDES]
        if None in (rows := {name: results.row(name) for name in names}).values():
            continue
        if load == "decode.b1.a1":
            rows |= {name: results.row(name) for name in (speed_key(side, "decode.b1.a32") for side in VLLM)}
        speeds = {name: row["value"] for name, row in rows.items() if row is not None}
        ours = speeds.pop(names[-1])
        better = max(speeds, key=speeds.__getitem__)
        target = Target(TARGETS[load]) if load in TARGETS else None
        ratio = round(ours / speeds[better], 4)
        results.put(f"serving.vs_vllm26.{load}", ratio, "ratio", target, about={"better": better})


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, tiny="a tiny shape on the CPU, coserve alone, to try the script")
    add_names(parser, "--only", SIDES, what="sides")
    parser.add_argument("--budget", type=float, default=1200.0, help="seconds after which no load is begun")
    parser.add_argument("--vllm-site", type=Path, default=None, help="folder with vLLM and what it needs")
    parser.add_argument("--adapters", default="0,1,32", help="of loads: how many adapters the engine has")
    options = parser.parse_args(arguments)
    options.adapters = [count for count in REGISTERED if str(count) in options.adapters.split(",")]
    if options.tiny and options.only != ["coserve"]:
        parser.error("--tiny needs --only coserve")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    until = time.time() + options.budget
    measured = loads(options.adapters)
    settings: dict[str, Any] = {"llama": LLAMA_8B, "rank": RANK, "loads": [asdict(load) for load in measured]}
    for side in set(options.only) & set(VLLM):
        told = peer_versions(options.vllm_site)
        if not told.get("vllm", "").startswith(VERSION):
            raise SystemExit(f"expected vLLM {VERSION}, got {told.get('vllm', 'none')}")
        strong = side == "vllm-strong"
        settings[side] = {"versions": told, "flags": engine_arguments(strong)}
        settings[side] |= {"environment": offline_environment(strong)}
    results = Results.of(options, FILE, __file__, settings, seed=SEED)
    failed = list[str]()
    with tempfile.TemporaryDirectory() as scratch:
        compared = Comparison(results, options.vllm_site, Path(scratch), until, measured, options.tiny)
        for side in options.only or (None,):
            try:
                if side:
                    compared.measure(side)
            except ChildProcessError as error:  # the other sides are measured all the same
                failed.append(f"{side}: {error}")
                print(failed[-1], flush=True)
            put_ratios(results)
            if results.keys():
                common_results.summarize(FILE, options.out)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
