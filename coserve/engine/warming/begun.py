"""A warm-up that was started ahead of the engine, before torch was imported."""

from __future__ import annotations

import os
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from coserve.config import Config
from coserve.warmup.fill import make_plan, start_warm_up
from coserve.warmup.gpu import find_gpu
from coserve.warmup.key import cache_environment
from coserve.warmup.messages import Task

CAPTURABLE = ("auto", "segmented")
"""Values of `lora_way` with which an engine on a GPU compiles layers and captures graphs."""


@dataclass(frozen=True)
class Begun:
    task: Task
    beside: bool
    """The engine may load its base meanwhile (`warmup.fill.Plan.beside`)."""
    socket: socket.socket
    process: subprocess.Popen[bytes]


def begin_warm_up(config: Config) -> Begun | None:
    """Starts the warm-up's process, and sets the variables that make this one use its caches. None: nothing to warm up."""
    wanted = config.device != "cpu" and config.compile != "off" and config.lora_way in CAPTURABLE
    gpu = find_gpu() if wanted else None
    if gpu is None:
        return None
    plan = make_plan(config, gpu)
    process, sock = start_warm_up(plan.task)
    os.environ.update(cache_environment(Path(plan.task.folder)))
    return Begun(plan.task, plan.beside, sock, process)
