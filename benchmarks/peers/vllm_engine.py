"""One vLLM engine in this process, which imports none of coserve's code: tokens a second of loads that come at once.

    python vllm_engine.py '{"engine": {...}, "adapters": [...], "loads": [...], "seed": 7, "began": ..., "until": ...}'

`engine`: arguments of `vllm.LLM`; `models`: classes that vLLM does not know, by architecture; `adapters`: folders;
`loads`: see `offline.Load`; `began`: when the process was started, `until`: when no load is begun any more, both by
`time.time()`. Prints FOUND and an object in JSON for the start, `{"start_s": ...}`, and for each load,
`{"load": NAME, "tok_s": [...]}`; all other lines are vLLM's.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import time
from collections.abc import Mapping
from typing import Any


def prompts_of(load: Mapping[str, Any], run: str, vocab: int, seed: int) -> list[list[int]]:
    """Return the token ids that `benchmarks.serving.case.Load` gives the same run."""
    chance = random.Random(f"{seed}/{load['name']}/{run}")
    return [[chance.randrange(2, vocab) for _ in range(load["prompt"])] for _ in range(load["requests"])]


def measure(given: Mapping[str, Any]) -> None:
    vllm: Any = importlib.import_module("vllm")
    request: Any = importlib.import_module("vllm.lora.request").LoRARequest
    for architecture, place in given.get("models", {}).items():
        vllm.ModelRegistry.register_model(architecture, place)
    engine = vllm.LLM(**given["engine"])
    vocab = engine.llm_engine.model_config.get_vocab_size()
    adapters = [request(f"a{i}", i + 1, folder) for i, folder in enumerate(given["adapters"])]
    registered = 0

    def generate(load: Mapping[str, Any], run: str) -> float:
        """Seconds from the call until all texts are there."""
        prompts = [{"prompt_token_ids": ids} for ids in prompts_of(load, run, vocab, given["seed"])]
        sampling = vllm.SamplingParams(max_tokens=load["output"], temperature=0.0, ignore_eos=True, detokenize=False)
        own = [adapters[i % load["adapters"]] for i in range(len(prompts))] if load["adapters"] else None
        began = time.perf_counter()
        answers = engine.generate(prompts, sampling, lora_request=own, use_tqdm=False)
        seconds = time.perf_counter() - began
        lengths = {len(answer.outputs[0].token_ids) for answer in answers}
        assert lengths == {load["output"]}, f"expected {load['output']} tokens of each request, got {lengths}"
        return seconds

    generate({"name": "start", "requests": 1, "prompt": 16, "output": 1, "adapters": 0}, "0")
    tell({"start_s": round(time.time() - given["began"], 1)})
    for load in given["loads"]:
        if time.time() > given["until"]:
            return
        for adapter in adapters[registered : load["registered"]]:
            engine.llm_engine.add_lora(adapter)
        registered = max(registered, load["registered"])
        generate({**load, **load["warm"]}, "warm")
        tokens = load["requests"] * load["output"]
        found = [tokens / generate(load, str(i)) for i in range(load["repeats"])]
        tell({"load": load["name"], "tok_s": [round(each, 1) for each in found]})


def tell(found: Mapping[str, object]) -> None:
    print(f"FOUND {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    measure(json.loads(sys.argv[1]))
