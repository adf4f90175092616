"""Time of a token of one request on a CPU, in float32, beside transformers at its best number of threads.

    python -m benchmarks.serving.cpu_decode [--model smollm2] [--tokens 64] [--rounds 3]

The daemon is asked over HTTP, with its own choice of threads; transformers runs in a process of its own. They take
turns, and each round's fastest half of the tokens counts, as other programs may run.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.common.options import make_parser
from benchmarks.common.provenance import cpu_name
from benchmarks.common.results import Results, Target
from coserve.cli.demos.run import daemon
from coserve.client import AsyncClient
from coserve.core.processes import usable_cores
from coserve.data.pretrained.gguf import is_gguf
from coserve.data.pretrained.source import locate

SCRIPT = "benchmarks.serving.cpu_decode"
PROMPT = "The meeting of the board begins at nine. In the first hour"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transformers", type=int, default=0, metavar="THREADS", help="measure only it, with threads")
    options = parser.parse_args()
    if options.transformers:
        print(json.dumps(_transformers(options.model, options.tokens, options.transformers)))
        return
    ours, theirs = asyncio.run(_measure(options.model, options.tokens, options.rounds))
    best = min(theirs, key=lambda threads: median(theirs[threads]))
    settings = {name: getattr(options, name) for name in ("model", "tokens", "rounds")}
    results = Results.of(options, "cpu_decode.json", __file__, settings, hardware=cpu_name())
    ratios = [other / own for own, other in zip(ours, theirs[best], strict=True)]
    about = {
        "ms": round(median(ours) * 1e3, 2),
        "transformers_ms": {str(threads): round(median(found) * 1e3, 2) for threads, found in theirs.items()},
        "cores": usable_cores(),
    }
    results.put("models.cpu_decode", round(median(ratios), 4), "fraction", Target(0.9), ratios, about)


async def _measure(model: str, tokens: int, rounds: int) -> tuple[list[float], dict[int, list[float]]]:
    """Return seconds a token of the daemon, and of transformers by number of threads, in each round."""
    ours: list[float] = []
    theirs: dict[int, list[float]] = {threads: [] for threads in range(1, usable_cores() + 1)}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "daemon.log"
        async with daemon(Path(folder) / "data", log, Console(stderr=True), model) as url, AsyncClient(url) as client:
            for _ in range(rounds):
                ours.append(_of_fastest(await _stream(client, tokens)))
                for threads, found in theirs.items():
                    command = [sys.executable, "-P", "-m", SCRIPT, "--model", model, "--tokens", str(tokens)]
                    command += ["--transformers", str(threads)]
                    answer = await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
                    found.append(_of_fastest(json.loads(answer.stdout.splitlines()[-1])))
    return ours, theirs


async def _stream(client: AsyncClient, tokens: int) -> list[float]:
    chunks = client.stream(PROMPT, max_tokens=tokens, temperature=0, ignore_eos=True)
    times = [time.perf_counter() async for _ in chunks]
    return [after - before for before, after in pairwise(times)]


def _transformers(model: str, tokens: int, threads: int) -> list[float]:
    """Return the seconds of each token after the first, of the same model as transformers loads it."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    path = Path(locate(model))
    folder, file = (path.parent, path.name) if is_gguf(str(path)) else (path, None)
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    times = list[float]()
    with torch.no_grad():
        past, ids = None, torch.arange(5, 17)[None]
        for _ in range(tokens):
            began = time.perf_counter()
            output = loaded(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
            past, ids = output.past_key_values, output.logits[:, -1].argmax(-1, keepdim=True)
            times.append(time.perf_counter() - began)
    return times[1:]


def _of_fastest(times: list[float]) -> float:
    """The mean of the faster half."""
    fastest = sorted(times)[: max(1, len(times) // 2)]
    return sum(fastest) / len(fastest)


if __name__ == "__main__":
    main()
