"""Plans a warm-up and starts its process: while an engine starts and serves, or by itself (`coserve warm`)."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from coserve.config import Config, config_to_json
from coserve.errors import StartupError
from coserve.processes import spawn_child, usable_cores
from coserve.warmup.gpu import CONTEXT_BYTES, Gpu, find_gpu
from coserve.warmup.key import cache_folder, cache_root, key_fields, shape_key
from coserve.warmup.messages import Progress, WarmUpTask

MODULE = "coserve.warmup.process"
MAX_WORKERS = 6
"""Compiling takes processor cores, and the engine needs some."""
WORKER_LAYERS = 2
"""About as many layers as the base of a worker has (`model.truncate`)."""


@dataclass(frozen=True)
class WarmUpPlan:
    task: WarmUpTask
    concurrent: bool
    """The engine may load its base meanwhile: a worker fits into the GPU memory that `memory_fraction` leaves."""


def plan_warm_up(config: Config, gpu: Gpu, *, cores: int | None = None, alone: bool = False) -> WarmUpPlan:
    """How to warm up for these settings. `alone`: no engine runs meanwhile, so workers may use the whole GPU."""
    root = cache_root(config)
    fields = key_fields(gpu, root)
    available = gpu.memory_bytes * (0.9 if alone else 1 - config.memory_fraction)
    fit = int(available // worker_bytes(config))
    most = max(1, min(MAX_WORKERS, (cores or usable_cores()) - 2))
    task = WarmUpTask(
        config=config_to_json(config).decode(),
        folder=str(cache_folder(root, fields)),
        fields=fields,
        shape=shape_key(config),
        workers=max(1, min(most, fit)),
    )
    return WarmUpPlan(task, concurrent=fit > 0)


def worker_bytes(config: Config) -> int:
    """Estimated GPU memory of one worker: a base of few layers, whose embedding is also its head."""
    described = Path(config.model) / "config.json"
    try:
        found = json.loads(described.read_bytes())
        hidden, inner = found["hidden_size"], found.get("intermediate_size", 4 * found["hidden_size"])
        experts = max(1, found.get("num_local_experts") or found.get("num_experts") or 1)
        weights = found["vocab_size"] * hidden + WORKER_LAYERS * (4 * hidden * hidden + 3 * hidden * inner * experts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 3 * CONTEXT_BYTES
    return CONTEXT_BYTES + 2 * int(weights)


def spawn_warm_up(task: WarmUpTask) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The warm-up's process, and the socket that it sends `Progress` lines to. Closing the socket ends the process."""
    ours, theirs = socket.socketpair()
    with theirs:
        return spawn_child(MODULE, theirs, msgspec.json.encode(task)), ours


def compile_ahead(config: Config, progress: Callable[[int, int], None]) -> None:
    """Compile every kernel that an engine with these settings can use, and keep them in the cache folder.

    Imports no torch: other processes compile. `progress` is called with (done, total) units; at the end they are equal.
    Blocks. An exception of `progress` ends the processes and is raised.

    Raises:
        StartupError: there is no GPU, or a part failed.
    """
    gpu = find_gpu() if config.device != "cpu" else None
    if gpu is None:
        raise StartupError("found no usable GPU: there is nothing to warm up")
    process, sock = spawn_warm_up(plan_warm_up(config, gpu, alone=True).task)
    last: Progress | None = None
    try:
        for last in _lines(sock):
            progress(last.done, last.total)
    finally:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
        process.wait()
    if last is None or not last.ended:
        raise StartupError("the warm-up's process died")
    if last.failed:
        raise StartupError("; ".join(last.notes))


def _lines(sock: socket.socket) -> Iterator[Progress]:
    with sock.makefile("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):  # the process was killed while it wrote
                return
            yield msgspec.json.decode(line, type=Progress)
