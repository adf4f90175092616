"""What processes compile before `bdlora/measure.py` measures, and the GEMM choices that they leave in files."""

from __future__ import annotations

import time
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


def wait_for(paths: Sequence[Path], seconds: float = 90.0) -> None:
    """Until other processes have written all of them, or for so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not all(path.exists() for path in paths):
        time.sleep(0.1)
