"""Fills the compilers' caches before `bdlora/measure.py` measures: each process compiles a part, for one rank without
the others."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CLASSES = (256, 128, 64, 32, 16)
"""Largest ranks of the adapters that a graph serves (`core.gpu_memory.LORA_RANKS`)."""
GEMM_ROWS = (1, 16, 32, 64)


@dataclass(frozen=True)
class WarmTask:
    """What one process compiles, of one base."""

    model: str
    classes: tuple[int, ...]
    """Kernels of steps with adapters of these ranks; 0: without adapters."""
    gemm_rows: tuple[int, ...] = ()
    """Measures the GEMMs of so many rows, for all processes of the base."""
    layers: bool = False
    train: bool = False


def tasks(models: Sequence[str]) -> list[WarmTask]:
    """Of bases as items name them."""
    found = list[WarmTask]()
    for model in models:
        if model.endswith("@1"):  # runs no adapters but in training, and no batches
            found.append(WarmTask(model, (0,), GEMM_ROWS[:1], layers=True))
            found.append(WarmTask(model, (), train=True))
            continue
        found.append(WarmTask(model, (0,), layers=True))
        found += [WarmTask(model, (rank,), GEMM_ROWS[place : place + 1]) for place, rank in enumerate(CLASSES)]
        if f"{model}@1" in models:  # the base that is trained
            found.append(WarmTask(model, (), train=True))
    return found


def rows_of(model: str) -> tuple[int, ...]:
    """Of the GEMMs that are measured for a base."""
    return GEMM_ROWS[:1] if model.endswith("@1") else GEMM_ROWS


def gemm_paths(folder: Path, model: str) -> list[Path]:
    """The measured choices of GEMMs, one for each number of rows."""
    return [folder / f"gemms-{model}-{rows}.json" for rows in rows_of(model)]


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


def wait_for(paths: Sequence[Path], seconds: float = 90.0) -> None:
    """Until other processes have written all of them, or for so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not all(path.exists() for path in paths):
        time.sleep(0.1)


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
