"""Workload of the HTTP benchmarks: sizes, folders of the base and the adapters, requests."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from benchmarks.serving.http_load import LoadRequest
from coserve.workloads.arrivals import Arrivals, Process, arrival_times

SEED = 7
RANK = 16
ADAPTERS = 32
FIRST_TOKEN = 1000
"""Of random prompts: the smaller ones may be special."""


@dataclass(frozen=True)
class Size:
    """Sizes of the base, the load and the engine."""

    config: dict[str, Any]
    device: str
    streams: int = 64
    rounds: int = 3
    prompt: int = 16
    output: int = 256
    rates: tuple[float, ...] = (5, 20, 10, 40)
    beside: tuple[float, ...] = (5, 20)
    seconds: float = 20.0
    median_in: int = 160
    median_out: int = 180
    spread: float = 0.7
    """Standard deviation of the logarithms of lengths."""
    longest_in: int = 2048
    longest_out: int = 1024
    batch_tokens: int = 4096
    row_tokens: int = 512
    kv_tokens: int = 200_000
    max_running: int = 256
    step_tokens: int = 2048
    processes: int = 4


LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
TINY = LLAMA_8B | {
    "vocab_size": 8192,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}
FULL = Size(LLAMA_8B, "cuda")
SMALL = Size(TINY, "cpu", 8, 2, 16, 32, (5,), (5,), 4.0, 20, 16, 0.7, 64, 64, 256, 64, 8192, 32, 256, 2)


def model_folder(folder: Path, size: Size) -> Path:
    """config.json, and the bundled tokenizer with a token for every id."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(size.config))
    bundled = Path(str(resources.files("coserve") / "assets" / "tiny"))
    shutil.copy(bundled / "tokenizer_config.json", folder)
    tokenizer = json.loads((bundled / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"Ġw{id}": id for id in range(max(vocab.values()) + 1, size.config["vocab_size"])}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def adapter_folders(root: Path, config: dict[str, Any], distinct: int = 2) -> list[Path]:
    """PEFT folders of random adapters; a few distinct contents under many names (each is loaded on its own)."""
    from benchmarks.adapters.fleet import llama_sites, write_adapter

    sites, folders = llama_sites(config, mlp=True), [root / f"a{i:02d}" for i in range(ADAPTERS)]
    for i, folder in enumerate(folders):
        if i < distinct:
            write_adapter(folder, sites, RANK, SEED + i)
        else:
            shutil.copytree(folders[i % distinct], folder, copy_function=os.link)
    return folders


def closed_loop_requests(size: Size, adapters: int, run: str) -> list[LoadRequest]:
    chance = random.Random(f"{SEED}/closed/{adapters}/{run}")
    vocab = size.config["vocab_size"]
    return [
        LoadRequest(
            index=i,
            prompt=[chance.randrange(FIRST_TOKEN, vocab) for _ in range(size.prompt)],
            max_tokens=size.output,
            adapter=f"a{i % adapters:02d}" if adapters else None,
        )
        for i in range(size.streams * (1 if run == "warm" else size.rounds))
    ]


def poisson_requests(size: Size, rate: float) -> list[LoadRequest]:
    """Poisson arrivals, log-normal lengths, adapters uniform."""
    chance = random.Random(f"{SEED}/online/{rate}")
    vocab = size.config["vocab_size"]

    def length(median: int, longest: int) -> int:
        return min(longest, max(1, round(chance.lognormvariate(math.log(median), size.spread))))

    times = arrival_times(Arrivals(process=Process.POISSON, rate=rate), size.seconds, chance)
    return [
        LoadRequest(
            index=i,
            prompt=[chance.randrange(FIRST_TOKEN, vocab) for _ in range(length(size.median_in, size.longest_in))],
            max_tokens=length(size.median_out, size.longest_out),
            adapter=f"a{chance.randrange(ADAPTERS):02d}",
            at=at,
        )
        for i, at in enumerate(times)
    ]


def corpus(size: Size) -> list[dict[str, str]]:
    text = resources.files("coserve").joinpath("assets/corpora/pirate.jsonl").read_text() * 4
    step = size.row_tokens * 8  # at least a token in eight characters
    return [{"text": text[i * 37 : i * 37 + step]} for i in range(128)]
