"""The processes that compile Triton kernels for a warm-up worker: forked from it, without CUDA."""

from __future__ import annotations

import os
import warnings
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

from coserve.core.processes import obey_parent, usable_cores

NICENESS = 5
"""Niceness added to the worker's: they yield to it, because it finds the kernels to compile next."""
MAX_PROCESSES = 16
"""Most processes of a worker: no task has enough kernels for more, and each takes some 100 MB."""
OOM_SCORE_ADJ = "1000"
"""OOM score: if the machine runs out of memory, Linux kills one of these processes rather than the engine."""


def pool_size(workers: int, cores: int) -> int:
    """Processes of each worker: twice its fraction of the cores, as workers seldom keep all of theirs busy."""
    return max(1, min(MAX_PROCESSES, 2 * cores // workers))


def start_compile_pool(workers: int) -> ProcessPoolExecutor:
    """Fork the processes from this one, which must not have used CUDA yet. They end with it, even if it is killed.
    `workers`: number of warm-up workers."""
    # Numeric libraries handle fork for their threads themselves; Python 3.12 warns of any threads.
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
