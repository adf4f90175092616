"""Capture of CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def gc_paused() -> Iterator[None]:
    """Garbage collection is disabled inside."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def captured(
    graph: torch.cuda.CUDAGraph, memory: tuple[int, int] | None = None, stream: torch.cuda.Stream | None = None
) -> Iterator[None]:
    """Captures the kernels launched inside into `graph`. `memory`: a pool that it shares with other graphs.

    Garbage collection is disabled meanwhile: it might free graphs, events or pinned memory, which CUDA forbids while a
    stream captures. CUDA calls of other threads, those that load adapters for one, are allowed.
    """
    with (
        gc_paused(),
        torch.cuda.graph(
            graph,
            pool=memory,  # type: ignore[arg-type]  # an opaque handle
            stream=stream,
            capture_error_mode="thread_local",
        ),
    ):
        yield
