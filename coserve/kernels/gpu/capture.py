"""Capturing CUDA graphs, and what must not happen meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def gc_paused() -> Iterator[None]:
    """The garbage collector rests inside."""
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
    """What is launched inside becomes `graph`. `memory`: a pool that it shares with others.

    The garbage collector rests meanwhile: what it finds may be graphs, events and pinned memory, and CUDA lets nobody
    free those while a stream captures. What other threads ask of CUDA, those that read adapters for one, is their affair.
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
