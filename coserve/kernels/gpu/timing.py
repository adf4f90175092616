"""Timing on a GPU, for choices made by measurement at start."""

from __future__ import annotations

from collections.abc import Callable

import torch

from coserve.kernels.gpu.capture import captured

REPLAYS = 8


def graph_ms(run: Callable[[], None]) -> float:
    """Least milliseconds of `run` as a CUDA graph. The caller ran it once, so that its kernels are compiled.

    The least, not the median: other processes may use the GPU meanwhile.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with captured(graph):
        run()
    spans = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        spans.append(float(begin.elapsed_time(end)))
    return min(spans)
