"""A request that is the first to ask for its adapter: what it waits for until the adapter can be copied to the GPU, and
on one until it is there.

    python -m benchmarks.serving.adapter_load [--tiny --out FOLDER]

An adapter of rank 16 at the seven sites of an 8B Llama's 32 layers, with random weights, is a PEFT file in bf16 or in
fp32. It is read, compared with its registered SHA-256, refused if it holds NaN or infinity, and packed for the kernels,
on a GPU in pinned memory. `warm`: the file is in the page cache; `cold`: it was told to leave it. Memory is new each
time.

Two floors are measured in turns with that: SHA-256 of as many bytes in memory, which one core computes as it is a
chain; and as many bytes read from the page cache into one small buffer.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.bdlora.plan import SHAPES, Shape
from benchmarks.common.options import make_parser
from benchmarks.common.provenance import cpu_name
from benchmarks.common.results import Results
from coserve.core.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from coserve.core.processes import usable_cores
from coserve.core.types import AdapterDigests, BaseSpec, LoraSettings, SiteSpec
from coserve.lora.files.peft import PREFIX, adapter_config, inspect_adapter
from coserve.lora.files.tensorfile import digest_file
from coserve.lora.store.files import load_packed
from coserve.lora.store.host_memory import HostMemory
from coserve.lora.store.packing import copied_into, packed_bytes

FILE = "adapter_load.json"
RANK, REPEATS, SEED = 16, 21, 0
THREADS = 2
"""Torch's, as in an engine."""
BUFFER = 1 << 18
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def base_spec(shape: Shape) -> BaseSpec:
    """Of a Llama in bf16, of which no weights are needed."""
    wide, narrow, inner = shape.hidden, shape.hidden * shape.kv_heads // shape.heads, shape.inner
    roles = {
        "self_attn.q_proj": (wide, wide),
        "self_attn.k_proj": (wide, narrow),
        "self_attn.v_proj": (wide, narrow),
        "self_attn.o_proj": (wide, wide),
        "mlp.gate_proj": (wide, inner),
        "mlp.up_proj": (wide, inner),
        "mlp.down_proj": (inner, wide),
    }
    return BaseSpec(
        name=shape.name,
        fingerprint="0" * 64,
        family="llama",
        dtype="bfloat16",
        device="cpu",
        layers=shape.layers,
        hidden=shape.hidden,
        vocab=shape.vocab,
        context=shape.context,
        eos_token_ids=(),
        default_targets=tuple(role.split(".")[1] for role in roles),
        sites={
            f"model.layers.{i}.{role}": SiteSpec(*sizes, i)
            for i in range(shape.layers)
            for role, sizes in roles.items()
        },
    )


def make_files(folder: Path, base: BaseSpec, dtype: torch.dtype) -> AdapterDigests:
    """An adapter's files, and what a registry would know of them."""
    folder.mkdir()
    generator, tensors = torch.Generator().manual_seed(SEED), dict[str, torch.Tensor]()
    for name, site in base.sites.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.randn(RANK, site.in_features, generator=generator).to(dtype)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = torch.randn(site.out_features, RANK, generator=generator).to(dtype)
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config = adapter_config(LoraSettings(r=RANK), base, base.sites)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config))
    found = inspect_adapter(folder, base)
    return AdapterDigests(weights=found.sha256, config=digest_file(folder, ADAPTER_CONFIG), alphas=found.alphas)


def first_use(folder: Path, base: BaseSpec, digests: AdapterDigests, pages: torch.Tensor | None) -> None:
    """`pages`: of the GPU, uint8; None: there is none."""
    memory = HostMemory(0, for_kernels=True)
    read = load_packed(folder, base, dtype=torch.bfloat16, digests=digests)
    host = memory.copy(read, memory.room(packed_bytes(read)))
    if pages is not None:
        copied_into(pages[: packed_bytes(host)], host)
        torch.cuda.synchronize()


def hash_in_memory(data: bytes) -> None:
    hashlib.sha256(data).digest()


def read_file(path: Path) -> None:
    buffer = memoryview(bytearray(BUFFER))
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def leave_page_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def free_memory() -> None:
    """Give the memory of earlier repeats back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    release = getattr(torch._C, "_host_emptyCache", None)  # of pinned memory; only where torch has CUDA
    if release is not None and torch.cuda.is_available():
        release()


def milliseconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    parser = make_parser(__doc__, tiny="a small base: the script is tried")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--file", default=FILE, help="name of the result")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    shape = SHAPES["tiny" if options.tiny else "8b"]
    base, on_gpu = base_spec(shape), torch.cuda.is_available()
    results = Results.of(
        options,
        options.file,
        __file__,
        {
            "rank": RANK,
            "sites": len(base.sites),
            "repeats": options.repeats,
            "cores": usable_cores(),
            "threads": THREADS,
        },
        seed=SEED,
        hardware=f"{torch.cuda.get_device_name()}, {cpu_name()}" if on_gpu else cpu_name(),
    )
    with tempfile.TemporaryDirectory() as root:
        works, before = dict[str, Callable[[], object]](), dict[str, Callable[[], object]]()
        sizes = dict[str, int]()
        for name, dtype in DTYPES.items():
            folder = Path(root) / name
            digests, path = make_files(folder, base, dtype), folder / ADAPTER_WEIGHTS
            pages = torch.empty(path.stat().st_size * 2, dtype=torch.uint8, device="cuda") if on_gpu else None
            kinds: dict[str, Callable[[], object]] = {
                "warm": partial(first_use, folder, base, digests, pages),
                "cold": partial(first_use, folder, base, digests, pages),
                "sha256": partial(hash_in_memory, path.read_bytes()),
                "read": partial(read_file, path),
            }
            for kind, work in kinds.items():
                key = f"adapter.first_use_ms.{name}.{kind}"
                works[key], sizes[key] = work, path.stat().st_size
                before[key] = partial(leave_page_cache if kind == "cold" else read_file, path)
        samples = {key: list[float]() for key in works}
        for _ in range(options.repeats):  # in turns: other programs slow down all alike
            for key, work in works.items():
                free_memory()
                before[key]()
                samples[key].append(milliseconds(work))
    for key, values in samples.items():
        results.put(key, round(statistics.median(values), 1), "ms", None, values, {"bytes": sizes[key]})


if __name__ == "__main__":
    main()
