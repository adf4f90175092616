"""coserve's engine in this process: tokens a second of loads that come all at once, as `vllm_engine.py` for vLLM.

Takes and prints what `vllm_engine.py` does; instead of `engine` and `adapters` it has `tiny`. The adapters are made on
the GPU.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.peers.vllm_engine import tell
from benchmarks.serving.case import FULL, TINY, Bench, Load, make_base


def load_of(given: Mapping[str, Any]) -> Load:
    return Load(given["requests"], given["prompt"], given["output"], given["adapters"])


async def measure(bench: Bench, given: Mapping[str, Any]) -> None:
    vocab, published = bench.shape.vocab, 0
    async with bench.serving():
        await bench.serve(Load(1, 16, 1).make_requests("start/0", vocab))
        tell({"start_s": round(time.time() - given["began"], 1)})
        for load in given["loads"]:
            if time.time() > given["until"]:
                return
            for i in range(published, load["registered"]):
                bench.publish_one("a", i)
            published = max(published, load["registered"])
            name, tokens = load["name"], load["requests"] * load["output"]
            await bench.serve(load_of(load | load["warm"]).make_requests(f"{name}/warm", vocab))
            found = [
                tokens / await bench.serve(load_of(load).make_requests(f"{name}/{i}", vocab))
                for i in range(load["repeats"])
            ]
            tell({"load": name, "tok_s": [round(each, 1) for each in found]})


def main() -> None:
    given = json.loads(sys.argv[1])
    shape = TINY if given["tiny"] else FULL
    bench = Bench(make_base(shape), shape)
    bench.capture()
    asyncio.run(measure(bench, given))


if __name__ == "__main__":
    main()
