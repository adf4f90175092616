"""Fills the compilers' caches before `bdlora/measure.py` measures: each process compiles a part, for one rank without
the others."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from benchmarks.bdlora.warm_tasks import WarmTask


def warm_caches(work: Sequence[WarmTask], size: int, folder: Path, *, tiny: bool, limit: float) -> None:
    """Does all of `work` at once, for at most `limit` seconds; what is missing is compiled when it is measured.

    `folder`: of the choices of GEMMs, and of a note of what was done, which a later run on this machine does not
    repeat.
    """
    folder.mkdir(parents=True, exist_ok=True)
    left = [(place, task) for place, task in enumerate(work) if not _note(folder, task).exists()]
    if not left:
        return
    began, context = time.monotonic(), multiprocessing.get_context("spawn")
    threads = max(1, (os.cpu_count() or 1) // len(left))
    processes = [context.Process(target=_work, args=(task, place, size, folder, threads, tiny)) for place, task in left]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, began + limit - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.join()
    missing = [task for _, task in left if not _note(folder, task).exists()]
    print(f"caches filled in {time.monotonic() - began:.1f} s, but for {missing}", flush=True)


def _note(folder: Path, task: WarmTask) -> Path:
    parts = (task.model, *task.classes, *(f"g{rows}" for rows in task.gemm_rows), "t" if task.train else "")
    return folder / ("done-" + "-".join(str(part) for part in parts))


def _work(task: WarmTask, place: int, size: int, folder: Path, threads: int, tiny: bool) -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(4 * threads if task.layers else 1)
    began = time.monotonic()
    try:
        import torch

        from benchmarks.bdlora.worker import Worker
        from coserve.model.parallel.mesh import LoneRank

        torch.set_num_threads(1)
        device = torch.device("cpu") if tiny else torch.device("cuda", place % size)
        if not tiny:
            torch.cuda.set_device(device)
        Worker(LoneRank(0, size), device, folder, tiny=tiny).warm(task, threads)
    except Exception:  # noqa: BLE001 - the others go on, and the run compiles what is missing
        print(f"{task}:\n{traceback.format_exc()}", flush=True)
    else:
        _note(folder, task).touch()
        print(f"{task} after {time.monotonic() - began:.1f} s", flush=True)
