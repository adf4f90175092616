"""vLLM's decode at the shape of `experts.py`, without adapters and with adapters of experts, in the same loads.

    python -m benchmarks.moe.with_vllm --vllm-site /tmp/site --out benchmarks/results [--layers 24]

Two engines, one after the other, each in a process of its own: without LoRA, and with room for 32 adapters. Random
weights; every adapter has the same file, under names of its own, with tensors of single experts. Requests have 8 prompt
tokens and 128 new ones, all at once, by vLLM's own Python interface without a tokenizer. Output tokens a second are the
median of three runs after a warm-up. Tried with vLLM 0.26's options; what it refuses is in the row of that engine.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.common.options import make_parser
from benchmarks.common.provenance import gpu_names
from benchmarks.common.results import Results
from benchmarks.moe.experts import ADAPTERS, FULL, MOE, RANK, REPEATS
from benchmarks.serving.case import SEED

SEQUENCES = (64, 1, 8, 128, 256)
PROMPT, OUTPUT = 8, 128
LIMIT = 280.0
"""Seconds of an engine, its start included."""


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


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=FULL.layers)
    parser.add_argument("--vllm-site", type=Path, default=None, help="folder with vLLM and what it needs")
    parser.add_argument(
        "--engine", type=int, default=None, help="used by this script: adapters of this process' engine"
    )
    parser.add_argument("--scratch", type=Path, default=None, help="used by this script")
    options = parser.parse_args()
    settings = {"layers": options.layers, "rank": RANK, "adapters": ADAPTERS, "prompt": PROMPT, "output": OUTPUT}
    results = Results.of(
        options,
        "moe_vllm.json",
        script="benchmarks.moe.with_vllm",
        hardware=gpu_names(False).splitlines()[0],
        seed=SEED,
        settings=settings,
    )
    site = [] if options.vllm_site is None else [str(options.vllm_site)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*site, str(Path.cwd())]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    base = dict[int, float]()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        write_model(scratch / "model", options.layers)
        write_adapter(scratch / "adapter", options.layers)
        for loras in (0, ADAPTERS):
            load = {"loras": loras, "rank": RANK, "repeats": REPEATS, "seed": SEED, "sequences": SEQUENCES}
            load |= {"prompt": PROMPT, "output": OUTPUT, "folder": folder}
            command = [sys.executable, "-m", "benchmarks.moe.vllm_engine", json.dumps(load)]
            try:
                done = subprocess.run(
                    command, env=environment, check=False, timeout=LIMIT, capture_output=True, text=True
                )
                error = done.stderr[-500:] if done.returncode else ""
            except subprocess.TimeoutExpired:
                error = f"it took more than {LIMIT:.0f} s"
            if error:
                results.put(f"moe.failed.vllm.a{loras}", 1, "failures", None, about={"error": error})
                continue
            for each_load, speeds in json.loads((scratch / "found.json").read_text()).items():
                sequences, adapters = map(int, each_load.split("/"))
                speed, each = statistics.median(speeds), [round(one, 1) for one in speeds]
                results.put(
                    f"moe.vllm.decode_tok_s.b{sequences}.a{adapters}", round(speed, 1), "output tok/s", None, each
                )
                if not adapters:
                    base[sequences] = speed
                elif sequences in base:
                    name = f"moe.vllm.retention.b{sequences}" + ("" if adapters == 1 else f".a{adapters}")
                    results.put(name, round(speed / base[sequences], 4), "fraction", None)


if __name__ == "__main__":
    main()
