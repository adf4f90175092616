"""vLLM's decode at Qwen3.5-9B's shape with random weights, in the loads of `qwen35.py`.

vLLM 0.26 registers the text model only inside the wrapper with a vision tower; `stand_ins/vllm_qwen35.py` registers it
alone, with vLLM's own layers. States are float32, as the checkpoints say and as coserve has them. CUDA graphs, no
prefix cache, greedy, every request to its last token; each load is warmed up by itself.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from benchmarks.common.results import Results
from benchmarks.peers.offline import plain_arguments, vllm_process
from benchmarks.peers.systems import peer_versions, vllm_environment
from benchmarks.serving.case import SEED

ARCHITECTURE = "Qwen3_5TextAlone"
LIMIT = 330.0
"""Seconds of the engine, its start included."""


def engine_arguments(context: int) -> dict[str, Any]:
    """Arguments of `vllm.LLM`, besides its model."""
    return plain_arguments(64, context) | {
        "attention_backend": "FLASH_ATTN",
        "mamba_ssm_cache_dtype": "float32",
        "gdn_prefill_backend": "triton",  # its other needs FlashInfer; prompts have 16 tokens here
    }


def loads(sequences: Sequence[int], prompt: int, output: int, repeats: int) -> list[dict[str, Any]]:
    """All at once, as `vllm_engine.py` takes them; named by their numbers of sequences."""
    common = {"prompt": prompt, "output": output, "adapters": 0, "registered": 0, "repeats": repeats, "warm": {}}
    return [{"name": str(count), "requests": count} | common for count in sequences]


def with_vllm(
    config: PreTrainedConfig, given: Sequence[Mapping[str, object]], context: int, site: Path | None, results: Results
) -> None:
    """Write `models.qwen35.vllm_tok_s.bN` of each load; what vLLM refuses is printed."""
    about = {
        "versions": peer_versions(site),
        "flags": engine_arguments(context),
        "environment": vllm_environment(False),
    }
    with tempfile.TemporaryDirectory() as folder:
        settings = config.to_dict() | {"architectures": [ARCHITECTURE], "dtype": "bfloat16"}
        (Path(folder) / "config.json").write_text(json.dumps(settings))
        told: dict[str, Any] = {"engine": engine_arguments(context) | {"model": folder}, "adapters": [], "seed": SEED}
        told |= {"models": {ARCHITECTURE: "vllm_qwen35:Qwen35Text"}, "loads": [*given]}
        told |= {"began": time.time(), "until": time.time() + LIMIT}
        try:
            for found in vllm_process(told, site, vllm_environment(False), LIMIT):
                if "load" in found:
                    key, speeds = f"models.qwen35.vllm_tok_s.b{found['load']}", found["tok_s"]
                    results.put(key, round(statistics.median(speeds), 1), "output tok/s", None, speeds, about)
        except ChildProcessError as error:
            print(f"vLLM: {error}", flush=True)
