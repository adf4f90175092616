"""Captures CUDA graphs, also while other threads use the GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

FREE_BYTES = 1 << 30
"""GPU memory that a capture may need, in bytes. While a stream captures, torch cannot free cached memory."""
TRAINING_PRIORITY, GENERATION_PRIORITY = -1, -2
"""Priorities of the streams on which graphs are captured, if training and generation run on the default stream.

torch hands out its 32 streams per priority round-robin. So a capture stream with the priority of copies could be a copy
stream, too, and its copies would become part of the graph.
"""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable garbage collection inside."""
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
    """Capture the kernels launched inside into `graph`. `memory`: id of a pool shared with other graphs.

    Garbage collection is disabled meanwhile: it might free graphs, events or pinned memory, which CUDA forbids during a
    capture. CUDA calls of other threads, such as those that load adapters, are allowed. Unlike `torch.cuda.graph`, a
    capture into a given pool does not wait for the device, and empties torch's cache only if less than `FREE_BYTES` are
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
    """Empty torch's cache of GPU memory if little other memory is free, since it cannot be emptied while a pool of
    graphs is in use.

    Returns whether it did: the memory must then be allocated again, and both take milliseconds.
    """
    little = torch.cuda.mem_get_info()[0] < FREE_BYTES
    if little:
        torch.cuda.empty_cache()
    return little


def _give_up(graph: torch.cuda.CUDAGraph, memory: tuple[int, int], device: torch.device) -> None:
    """End a capture that has failed. If CUDA cannot end it, torch would count the pool as in use and never free it."""
    try:
        graph.capture_end()
    except RuntimeError:
        with suppress(RuntimeError):  # the capture itself had ended; a later call failed
            torch._C._cuda_endAllocateToPool(device.index or 0, memory)
            torch._C._cuda_releasePool(device.index or 0, memory)
