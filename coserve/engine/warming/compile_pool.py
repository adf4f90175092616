"""The processes that compile Triton kernels for a worker of a warm-up: forked from it, without CUDA."""

from __future__ import annotations

import os
import warnings
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

from coserve.core.processes import obey_parent, usable_cores

NICENESS = 5
"""More than the worker's own: they yield to it, as its next step names the kernels that are compiled next."""
MAX_PROCESSES = 16
"""Processes of a worker: no part has so many kernels that more would help, and each takes some 100 MB."""
OOM_SCORE_ADJ = "1000"
"""Where the machine runs out of memory, Linux kills one of these and not the engine."""


def pool_size(workers: int, cores: int) -> int:
    """Processes of each worker: twice its share of the cores, as workers seldom keep all of theirs busy."""
    return max(1, min(MAX_PROCESSES, 2 * cores // workers))


def start_compile_pool(workers: int) -> ProcessPoolExecutor:
    """Fork them from this process, which must not have used CUDA yet. They end with it, also if it is killed.
    `workers`: of the warm-up."""
    # Threads of numeric libraries, which their own handlers of fork take care of; Python 3.12 warns of any.
    warnings.filterwarnings("ignore", ".* is multi-threaded, use of fork", DeprecationWarning)
    processes, parent = pool_size(workers, usable_cores()), os.getpid()
    pool = ProcessPoolExecutor(processes, get_context("fork"), initializer=_initialize, initargs=(parent,))
    pool.submit(os.getpid).result()  # the first call forks all of them
    return pool


def _initialize(parent: int) -> None:
    obey_parent(parent)
    os.nice(NICENESS)
    with suppress(OSError):  # not on Linux
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE_ADJ)
