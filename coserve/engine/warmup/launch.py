"""Plans and starts a warm-up: in the process of a starting engine, or separately (`coserve warm`). Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import cache_from_source, find_spec
from pathlib import Path

import msgspec

from coserve.config import Config, config_to_json
from coserve.core.errors import StartupError
from coserve.core.link.channel import frame
from coserve.core.processes import spawn_child, usable_cores
from coserve.engine.warmup import key
from coserve.engine.warmup.parts import Progress, WarmUpTask
from coserve.engine.warmup.warm_up import warm_up

MODULE = "coserve.engine.warmup.warm_up"
MAX_WORKERS = 12
CORES_A_WORKER = 3
"""Cores per worker: it keeps one busy itself, and its compile processes use the rest."""
WORKER_LAYERS = 2
"""Approximate number of layers of a worker's base (`model.truncate`)."""
WORK_BYTES = 2 << 30
"""Approximate GPU memory of a worker's steps and micro-batches."""
UNKNOWN_BYTES = 2 << 30
"""Assumed GPU memory of a worker's base when its size is unknown."""
CAPTURABLE = ("auto", "segmented")
"""Values of `lora_backend` with which an engine on a GPU compiles layers and captures graphs."""


@dataclass(frozen=True)
class StartedWarmUp:
    """A warm-up's process. `socket`: it sends `Progress`, and closing it ends the process. `concurrent`: the
    engine may load its base meanwhile."""

    task: WarmUpTask
    concurrent: bool
    socket: socket.socket
    process: subprocess.Popen[bytes]


def plan_warm_up(
    config: Config, gpu: key.Gpu, *, taken: int | None = 0, cores: int | None = None
) -> tuple[WarmUpTask, bool]:
    """Plan the warm-up, and return whether a worker fits into the GPU's memory next to `taken` bytes (None: unknown).
    If not, nothing else may use the GPU during the warm-up."""
    root = key.cache_root(config)
    fields = key.key_fields(gpu, root)
    memory = int(gpu.memory_bytes * config.memory_fraction)
    few_layers = base_bytes(config, WORKER_LAYERS)
    worker = key.CONTEXT_BYTES + WORK_BYTES + (UNKNOWN_BYTES if few_layers is None else few_layers)
    left = memory if taken is None else memory - taken
    concurrent = taken is not None and left >= worker
    fit = (left if concurrent else memory) // worker
    task = WarmUpTask(
        config=config_to_json(config).decode(),
        folder=str(key.cache_folder(root, fields)),
        fields=fields,
        shape=key.shape_key(config),
        workers=max(1, min(MAX_WORKERS, (cores or usable_cores()) // CORES_A_WORKER, fit)),
    )
    return task, concurrent


def base_bytes(config: Config, layers: int | None = None) -> int | None:
    """Estimate the GPU memory of a base with `layers` layers and tied embeddings; `layers` None: of a rank's shard of
    the whole base. None if unknown: the base is no folder, or its config has other keys."""
    if config.model == "bundled":
        return 0  # some MB
    try:
        found = json.loads((Path(config.model) / "config.json").read_bytes())
        hidden, inner = found["hidden_size"], found.get("intermediate_size", 4 * found["hidden_size"])
        experts = max(1, *(found.get(name) or 1 for name in ("num_local_experts", "num_experts", "n_routed_experts")))
        if experts > 1:
            inner = found.get("moe_intermediate_size") or inner
        count, heads = (layers, 1) if layers is not None else (found["num_hidden_layers"], 2)
        layer = 4 * hidden * hidden + 3 * hidden * inner * experts
        numbers = heads * found["vocab_size"] * hidden + count * layer // (1 if layers is not None else config.tp)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return int(numbers) * (4 if config.dtype == "float32" else 2)


def start_warm_up(config: Config) -> StartedWarmUp | None:
    """Start the warm-up's process, and make this process use its caches. None if there is nothing to warm up."""
    gpu = _gpu(config)
    if gpu is None:
        return None
    base = base_bytes(config)
    task, concurrent = plan_warm_up(config, gpu, taken=None if base is None else key.CONTEXT_BYTES + base)
    ours, theirs = socket.socketpair()
    with theirs:
        process = spawn_child(MODULE, theirs)
    with contextlib.suppress(OSError):  # it has ended: `follow` notices
        ours.sendall(frame(msgspec.msgpack.Encoder(), task))
    os.environ.update(key.compiler_environment(Path(task.folder)))
    return StartedWarmUp(task, concurrent, ours, process)


def use_caches(config: Config) -> WarmUpTask | None:
    """Make this process, a follower rank, use the caches that rank 0's warm-up fills. None if there is nothing to warm
    up."""
    gpu = _gpu(config)
    if gpu is None:
        return None
    task, _ = plan_warm_up(config, gpu)
    os.environ.update(key.compiler_environment(Path(task.folder)))
    return task


def _gpu(config: Config) -> key.Gpu | None:
    """The GPU to compile for; None if nothing is compiled."""
    wanted = config.device != "cpu" and config.compile != "off" and config.lora_backend in CAPTURABLE
    return key.find_gpu() if wanted else None


def compile_ahead(config: Config, progress: Callable[[int, int], None]) -> None:
    """Compile every kernel that an engine with these settings can use, and keep them in the cache folder. Blocks.

    `progress` is called with (done, total) units, which are equal at the end. An exception of `progress` ends the
    processes and is raised.

    Raises:
        StartupError: there is no GPU, or a part failed.
    """
    gpu = key.find_gpu() if config.device != "cpu" else None
    if gpu is None:
        raise StartupError("found no usable GPU: there is nothing to warm up")
    cache_bytecode(config)
    task, _ = plan_warm_up(config, gpu)
    notes = list[str]()

    def report(found: Progress) -> None:
        notes[:] = found.notes
        progress(found.done, found.total)

    asyncio.run(warm_up(task, report))
    if notes:
        raise StartupError("; ".join(notes))


def cache_bytecode(config: Config, library: str = "torch") -> None:
    """Let this process and its children cache bytecode in the folder of all caches if `library` has none beside its
    sources and none can be written there.

    That is so in images whose installer compiles nothing, with `PYTHONDONTWRITEBYTECODE` or a read-only installation:
    each start would compile 3,700 modules, which takes half of the CPU time of its imports.
    """
    found = find_spec(library)
    if found is None or found.origin is None or sys.pycache_prefix is not None:
        return
    writable = not sys.dont_write_bytecode and os.access(Path(found.origin).parent, os.W_OK)
    if writable or Path(cache_from_source(found.origin)).exists():
        return
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(key.cache_root(config) / "bytecode")
    sys.dont_write_bytecode = False
