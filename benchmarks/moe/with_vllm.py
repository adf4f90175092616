"""vLLM's decode at the shape of `experts.py`, without adapters and with adapters of experts, in the same loads.

    python -m benchmarks.moe.with_vllm --vllm-site /tmp/site --out benchmarks/results [--layers 24]

Two engines, one after the other, each in a process of its own: without LoRA, and with room for 32 adapters. Random
weights; every adapter has the same file, under names of its own, with tensors of single experts. Requests have 8 prompt
tokens and 128 new ones, all at once, by vLLM's own Python interface without a tokenizer. Output tokens a second are the
median of three runs after a warm-up. Tried with vLLM 0.26's options; what it refuses is in the row of that engine.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.common.options import make_parser
from benchmarks.common.results import Results
from benchmarks.moe.experts import ADAPTERS, FULL, MOE, RANK, REPEATS
from benchmarks.peers.offline import plain_arguments, vllm_process
from benchmarks.peers.systems import vllm_environment
from benchmarks.serving.case import SEED

SEQUENCES = (64, 1, 8, 128, 256)
PROMPT, OUTPUT = 8, 128
LIMIT = 280.0
"""Seconds of an engine, its start included; the second one has also what the first left."""


def write_model(folder: Path, layers: int) -> None:
    """Write the config of Qwen3-30B-A3B's shape with so many layers."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": FULL.vocab,
        "hidden_size": FULL.hidden,
        "intermediate_size": FULL.inner,
        "moe_intermediate_size": MOE.inner,
        "num_experts": MOE.experts,
        "num_experts_per_tok": MOE.chosen,
        "num_hidden_layers": layers,
        "num_attention_heads": FULL.heads,
        "num_key_value_heads": FULL.kv_heads,
        "head_dim": 128,
        "max_position_embeddings": FULL.context,
        "norm_topk_prob": True,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))


def write_adapter(folder: Path, layers: int) -> None:
    """Write an adapter with a pair at gate, up and down of each expert."""
    g = torch.Generator().manual_seed(SEED)
    sizes = {"gate_proj": (FULL.hidden, MOE.inner), "up_proj": (FULL.hidden, MOE.inner)}
    sizes["down_proj"] = MOE.inner, FULL.hidden
    tensors = {}
    for layer in range(layers):
        for expert in range(MOE.experts):
            for name, (inputs, outputs) in sizes.items():
                path = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}"
                for kind, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                    tensors[f"{path}.lora_{kind}.weight"] = (torch.randn(shape, generator=g) * 0.02).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [*sizes], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def engine_arguments(model: str, loras: int) -> dict[str, Any]:
    """Arguments of `vllm.LLM`, with room for so many adapters."""
    found = plain_arguments(max(SEQUENCES), 1024) | {"model": model}
    return found | ({"enable_lora": True, "max_loras": loras, "max_lora_rank": RANK} if loras else {})


def loads(loras: int) -> list[dict[str, Any]]:
    """Of an engine with room for so many adapters, as `vllm_engine.py` takes them; named SEQUENCES/ADAPTERS."""
    found = list[dict[str, Any]]()
    for adapters in (1, loras) if loras else (0,):  # to register all of them takes long
        for sequences in SEQUENCES:
            load = {"name": f"{sequences}/{adapters}", "requests": sequences, "prompt": PROMPT, "output": OUTPUT}
            load |= {"adapters": min(adapters, sequences), "registered": adapters, "repeats": REPEATS, "warm": {}}
            found.append(load)
    return found


def put(results: Results, load: str, speeds: list[float], base: dict[int, float]) -> None:
    """Write a load's row and its share of the speed without adapters; `base`: that speed, by sequences."""
    sequences, adapters = map(int, load.split("/"))
    speed = statistics.median(speeds)
    results.put(f"moe.vllm.decode_tok_s.b{sequences}.a{adapters}", round(speed, 1), "output tok/s", None, speeds)
    if not adapters:
        base[sequences] = speed
    elif sequences in base:
        name = f"moe.vllm.retention.b{sequences}" + ("" if adapters == 1 else f".a{adapters}")
        results.put(name, round(speed / base[sequences], 4), "fraction", None)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=FULL.layers)
    parser.add_argument("--vllm-site", type=Path, default=None, help="folder with vLLM and what it needs")
    options = parser.parse_args()
    settings = {"layers": options.layers, "rank": RANK, "adapters": ADAPTERS, "prompt": PROMPT, "output": OUTPUT}
    results = Results.of(options, "moe_vllm.json", __file__, settings, seed=SEED)
    base, until = dict[int, float](), time.time()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        write_model(scratch / "model", options.layers)
        write_adapter(scratch / "adapter", options.layers)
        for loras in (0, ADAPTERS):
            folders = [str(scratch / "adapter")] * loras
            given = {"engine": engine_arguments(str(scratch / "model"), loras), "adapters": folders, "seed": SEED}
            until += LIMIT
            given |= {"loads": loads(loras), "began": time.time(), "until": until}
            try:
                for found in vllm_process(given, options.vllm_site, vllm_environment(False), until - time.time()):
                    if "load" in found:
                        put(results, found["load"], found["tok_s"], base)
            except ChildProcessError as error:
                results.put(f"moe.failed.vllm.a{loras}", 1, "failures", None, about={"error": str(error)})


if __name__ == "__main__":
    main()
