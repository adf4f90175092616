"""Capture of CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

FREE_BYTES = 1 << 30
"""What a capture may need of the GPU's memory. While a stream captures, torch cannot free what it holds."""
TRAINING_PRIORITY, GENERATION_PRIORITY = -1, -2
"""Of the streams that graphs are captured on where training and generation have the default stream. torch gives out its
32 streams of a priority in turn, so one of the priority of copies would be a copy's, too, which would become part of
the graph."""


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
    stream captures. CUDA calls of other threads, those that load adapters for one, are allowed. Unlike
    `torch.cuda.graph`, a capture into a given pool does not wait for the device, and frees what torch holds only where
    less than `FREE_BYTES` are
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
        free_cached()
        with torch.cuda.stream(stream):  # the device may still be busy with other streams
            graph.capture_begin(memory, capture_error_mode="thread_local")  # type: ignore[arg-type]  # an opaque handle
            try:
                yield
                graph.capture_end()
            except BaseException:
                _give_up(graph, memory, stream.device)
                raise


def free_cached() -> bool:
    """Let torch free the memory that it holds for later, where little else is free: it cannot while a pool of graphs is
    in use. Returns whether it did: what it freed must be allocated again, and both take milliseconds."""
    little = torch.cuda.mem_get_info()[0] < FREE_BYTES
    if little:
        torch.cuda.empty_cache()
    return little


def _give_up(graph: torch.cuda.CUDAGraph, memory: tuple[int, int], device: torch.device) -> None:
    """End a capture that has failed. Where CUDA cannot end it, torch would go on to count the pool as in use, and never
    free what it holds."""
    try:
        graph.capture_end()
    except RuntimeError:
        with suppress(RuntimeError):  # the capture had ended, and something behind it failed
            torch._C._cuda_endAllocateToPool(device.index or 0, memory)
            torch._C._cuda_releasePool(device.index or 0, memory)
