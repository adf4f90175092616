"""Starts a warm-up: ahead of serving (`coserve warm`), or beside an engine."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from coserve.config import Config, config_to_json
from coserve.errors import StartupError
from coserve.processes import spawn_child
from coserve.warmup.gpu import Gpu, find_gpu
from coserve.warmup.key import cache_folder, key_fields, shape_key
from coserve.warmup.messages import Progress, Task

MODULE = "coserve.warmup.process"
WORKERS = 6
"""Most processes that compile at once. Compilation takes processor cores, and the engine needs some."""
CONTEXT_BYTES = 1 << 30
"""What a worker's CUDA context, libraries and activations take on the GPU, at least."""
LAYERS = 2
"""About as many layers has a worker's base."""


@dataclass(frozen=True)
class Plan:
    """A task, and when it may run."""

    task: Task
    beside: bool
    """Beside an engine: the workers fit into the share of the GPU's memory that `memory_fraction` leaves."""


def make_plan(config: Config, gpu: Gpu, *, cores: int | None = None, alone: bool = False) -> Plan:
    """How to warm up for these settings. `alone`: no engine runs meanwhile, so that workers may take the whole GPU."""
    fields = key_fields(gpu)
    left = gpu.memory_bytes * (0.9 if alone else 1 - config.memory_fraction)
    fit = int(left // worker_bytes(config))
    most = max(1, min(WORKERS, (cores or os.cpu_count() or 2) - 2))
    task = Task(
        config=config_to_json(config).decode(),
        folder=str(cache_folder(config, fields)),
        fields=fields,
        shape=shape_key(config),
        workers=max(1, min(most, fit)),
    )
    return Plan(task, beside=fit > 0)


def worker_bytes(config: Config) -> int:
    """About what one worker takes on the GPU: a base of few layers, whose embedding is its head too."""
    described = Path(config.model) / "config.json"
    try:
        found = json.loads(described.read_bytes())
        hidden, inner = found["hidden_size"], found.get("intermediate_size", 4 * found["hidden_size"])
        experts = max(1, found.get("num_local_experts") or found.get("num_experts") or 1)
        weights = found["vocab_size"] * hidden + LAYERS * (4 * hidden * hidden + 3 * hidden * inner * experts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 3 * CONTEXT_BYTES
    return CONTEXT_BYTES + 2 * int(weights)


def start_warm_up(task: Task) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The warm-up's process, and the socket that its `Progress` lines come from. Closing the socket ends it."""
    ours, theirs = socket.socketpair()
    with theirs:
        return spawn_child(MODULE, theirs, msgspec.json.encode(task)), ours


def run_fill(config: Config, progress: Callable[[int, int], None]) -> None:
    """Compile what an engine with these settings may ever run, in processes of their own, into `config`'s cache folder.

    Imports no torch. `progress` is called with (done, total) parts of the work; at the end they are equal. Blocks; an
    exception of `progress` ends it, and the processes with it.

    Raises:
        StartupError: no GPU, or a process that could not do its part.
    """
    gpu = find_gpu() if config.device != "cpu" else None
    if gpu is None:
        raise StartupError("found no usable GPU: there is nothing to warm up")
    process, sock = start_warm_up(make_plan(config, gpu, alone=True).task)
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
    if last.notes:
        raise StartupError("; ".join(last.notes))


def _lines(sock: socket.socket) -> Iterator[Progress]:
    with sock.makefile("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):  # the end of a process that was killed
                return
            yield msgspec.json.decode(line, type=Progress)
