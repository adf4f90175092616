"""Thousands of adapters in a data folder: copies of a few that were imported, whose files are links to theirs."""

from __future__ import annotations

import json
import math
import os
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import msgspec
import torch
from safetensors.torch import save_file

from benchmarks.common.metrics import metric_values
from coserve.core.limits import PAGE_LIMIT
from coserve.core.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from coserve.core.types import AdapterRef, SiteSpec
from coserve.lora.files.packed_header import PACKED_FILE
from coserve.state.folder import DataFolder
from coserve.state.registry.registry import Registry


def llama_sites(config: dict[str, Any], *, mlp: bool) -> dict[str, SiteSpec]:
    """The sites of a Llama's layers; without `mlp` those of its attention."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv = (config["head_dim"] * config[name] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"q": (hidden, heads), "k": (hidden, kv), "v": (hidden, kv), "o": (heads, hidden)}
    more = {"gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden)} if mlp else {}
    parts = {
        **{f"self_attn.{name}": shape for name, shape in shapes.items()},
        **{f"mlp.{n}": s for n, s in more.items()},
    }
    return {
        f"model.layers.{layer}.{name}_proj": SiteSpec(*shape, layer)
        for layer in range(config["num_hidden_layers"])
        for name, shape in parts.items()
    }


def write_adapter(folder: Path, sites: dict[str, SiteSpec], rank: int, seed: int) -> None:
    """A PEFT folder of random matrices, bf16."""
    folder.mkdir(parents=True)
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for name, site in sites.items():
        for kind, shape in (("A", (rank, site.in_features)), ("B", (site.out_features, rank))):
            drawn = torch.randn(shape, generator=generator) * 0.02
            tensors[f"base_model.model.{name}.lora_{kind}.weight"] = drawn.bfloat16()
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    targets = sorted({name.rpartition(".")[2] for name in sites})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "lora_dropout": 0.0}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config | {"target_modules": targets, "bias": "none"}))


def link(data: Path, originals: Sequence[str], names: Sequence[str]) -> None:
    """Register `names` as adapters of one version each, in turns with the files of `originals`, which were imported.
    Also while a daemon runs: it reads the registry for each request."""
    folder = DataFolder(data)
    registry = Registry(folder.database)
    records = [registry.adapter(name) for name in originals]
    for number, name in enumerate(names):
        record, ref = records[number % len(records)], AdapterRef(name, 1)
        folder.adapter(ref).mkdir(parents=True)
        for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, PACKED_FILE):
            source = folder.adapter(record.ref) / file
            if source.exists():
                os.link(source, folder.adapter(ref) / file)
        registry.add_adapter(msgspec.structs.replace(record, ref=ref))
    registry.close()


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:
        found: bytes = answer.read()
    return found


def wait_ready(url: str, until: float = math.inf) -> None:
    """Raises `TimeoutError` at a monotonic time, and `URLError` if the daemon has ended."""
    while time.monotonic() < until:
        try:
            get(f"{url}/health/ready")
            return
        except HTTPError:  # it starts
            time.sleep(0.02)
    raise TimeoutError(f"the daemon is not ready: {get(f'{url}/health').decode()[:500]}")


def ablation(script: str, part: str) -> dict[str, str]:
    """Variables of a daemon in which `ablation/` beside the script turns a part off; empty: none."""
    path = [str(Path(script).parent / "ablation"), os.environ.get("PYTHONPATH", "")]
    return {"ABLATION": part, "PYTHONPATH": os.pathsep.join(filter(None, path))} if part else {}


def load_seconds(url: str) -> dict[str, tuple[float, float]]:
    """Loads of adapters and their seconds so far, by cause, from `/metrics`."""
    page = get(f"{url}/metrics").decode()
    counts, seconds = (metric_values(page, f"coserve_adapter_{name}_total") for name in ("loads", "load_seconds"))
    return {dict(labels)["cause"]: (count, seconds[labels]) for labels, count in counts.items()}


def step_totals(url: str) -> tuple[float, float, float]:
    """Generation steps, their seconds and their adapters so far, from `/metrics`."""
    page = get(f"{url}/metrics").decode()
    names = ("generation_steps", "generation_step_seconds", "step_adapters")
    steps, seconds, adapters = (sum(metric_values(page, f"coserve_{name}_total").values()) for name in names)
    return steps, seconds, adapters


def post(url: str, body: object = None) -> None:
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()


def resident(url: str, search: str) -> set[str]:
    """Names with `search` that are in the daemon's host memory or in pages."""
    found, after = set[str](), ""
    while True:
        query = f"search={search}&resident=true&limit={PAGE_LIMIT}&after={after}"
        page = json.loads(get(f"{url}/adapters?{query}"))
        found |= {each["id"] for each in page["data"]}
        if not page["has_more"]:
            return found
        after = page["data"][-1]["id"]


def warm(url: str, names: Sequence[str], search: str) -> None:
    """Have all of them read into host memory, as far as it holds them, and wait until none is read any more and the
    CUDA graphs of their LoRA ranks are captured."""
    missing = sorted(set(names) - resident(url, search))
    before = _reads(url)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: post(f"{url}/adapters/{name}/prefetch"), missing))
    while _reads(url) < before + len(missing):
        time.sleep(0.1)
    time.sleep(1.5)  # the engine counts once a second
    while b"\ncoserve_cuda_graphs_missing 0.0\n" not in get(f"{url}/metrics"):
        time.sleep(0.2)


def _reads(url: str) -> float:
    return sum(load_seconds(url)[cause][0] for cause in ("read", "pack"))


def in_page_cache(path: Path) -> bool:
    """Whether the whole file is in the page cache."""
    view, at = memoryview(bytearray(1 << 20)), 0
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        while at < size:
            try:
                at += os.preadv(file.fileno(), [view], at, os.RWF_NOWAIT)
            except BlockingIOError:
                return False
    return True
