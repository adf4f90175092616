"""Starts the warm-up's process before the engine imports torch, which takes seconds."""

from __future__ import annotations

import os
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from coserve.config import Config
from coserve.warmup.gpu import find_gpu
from coserve.warmup.key import compiler_environment
from coserve.warmup.launch import WarmUpPlan, plan_warm_up, spawn_warm_up
from coserve.warmup.messages import WarmUpTask

CAPTURABLE = ("auto", "segmented")
"""Values of `lora_backend` with which an engine on a GPU compiles layers and captures graphs."""


@dataclass(frozen=True)
class StartedWarmUp:
    """A warm-up's process. `socket`: `Progress` lines come from it, and closing it ends the process."""

    task: WarmUpTask
    concurrent: bool
    """See `warmup.launch.WarmUpPlan`."""
    socket: socket.socket
    process: subprocess.Popen[bytes]


def start_warm_up(config: Config) -> StartedWarmUp | None:
    """Start the warm-up's process, and make this process use its caches. None if there is nothing to warm up."""
    plan = _plan(config)
    if plan is None:
        return None
    process, sock = spawn_warm_up(plan.task)
    os.environ.update(compiler_environment(Path(plan.task.folder)))
    return StartedWarmUp(plan.task, plan.concurrent, sock, process)


def use_caches(config: Config) -> WarmUpTask | None:
    """Make this process, a rank that follows, use the caches that the warm-up of rank 0 fills. None if there is nothing to warm up."""
    plan = _plan(config)
    if plan is None:
        return None
    os.environ.update(compiler_environment(Path(plan.task.folder)))
    return plan.task


def _plan(config: Config) -> WarmUpPlan | None:
    wanted = config.device != "cpu" and config.compile != "off" and config.lora_backend in CAPTURABLE
    gpu = find_gpu() if wanted else None
    return None if gpu is None else plan_warm_up(config, gpu)
