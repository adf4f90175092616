"""One vLLM engine of `with_vllm.py`, in a process that imports none of coserve's code."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def measure(given: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return tokens a second of each load, as SEQUENCES/ADAPTERS, by one engine with room for `loras` adapters."""
    scratch, loras = Path(given["folder"]), given["loras"]
    vllm: Any = importlib.import_module("vllm")
    request: Any = importlib.import_module("vllm.lora.request").LoRARequest
    more = {"enable_lora": True, "max_loras": loras, "max_lora_rank": given["rank"]} if loras else {}
    engine = vllm.LLM(
        model=str(scratch / "model"),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        seed=given["seed"],
        max_num_seqs=max(given["sequences"]),
        max_model_len=1024,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.9,
        **more,
    )
    sampling = vllm.SamplingParams(max_tokens=given["output"], temperature=0.0, ignore_eos=True, detokenize=False)
    found = dict[str, list[float]]()
    for sequences in given["sequences"]:
        for adapters in (1, loras) if loras else (0,):
            prompts = [
                {"prompt_token_ids": [(7 * i + j) % 1000 + 5 for j in range(given["prompt"])]} for i in range(sequences)
            ]
            own = None
            if adapters:
                numbers = [i % min(adapters, sequences) + 1 for i in range(sequences)]
                own = [request(f"a{number}", number, str(scratch / "adapter")) for number in numbers]
            speeds = []
            for _ in range(1 + given["repeats"]):
                began = time.perf_counter()
                engine.generate(prompts, sampling, lora_request=own, use_tqdm=False)
                speeds.append(sequences * given["output"] / (time.perf_counter() - began))
            found[f"{sequences}/{adapters}"] = speeds[1:]
    return found


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    (Path(options["folder"]) / "found.json").write_text(json.dumps(measure(options)))
