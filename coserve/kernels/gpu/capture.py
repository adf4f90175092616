"""Capture of CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

FREE_BYTES = 1 << 30
"""What a capture may need of the GPU's memory. While a stream captures, torch cannot free what it holds."""


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
    stream captures. CUDA calls of other threads, those that load adapters for one, are allowed. Unlike `torch.cuda.graph`, a
    capture into a given pool does not wait for the device, and frees what torch holds only where less than `FREE_BYTES` are
    free: both take longer than the capture.
    """
    with gc_paused():
        if memory is None or stream is None:
            with torch.cuda.graph(
                graph,
                pool=memory,  # type: ignore[arg-type]  # an opaque handle
                stream=stream,
                capture_error_mode="thread_local",
            ):
                yield
            return
        if torch.cuda.mem_get_info()[0] < FREE_BYTES:
            torch.cuda.empty_cache()
        with torch.cuda.stream(stream):  # the device may still be busy with other streams
            graph.capture_begin(memory, capture_error_mode="thread_local")  # type: ignore[arg-type]  # an opaque handle
            try:
                yield
            finally:
                graph.capture_end()
