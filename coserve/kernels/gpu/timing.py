"""GPU timing for choices that are made by measurement at start."""

from __future__ import annotations

from collections.abc import Callable

import torch

from coserve.kernels.gpu.capture import captured

REPLAYS = 8


def graph_ms(run: Callable[[], None]) -> float:
    """Return the least milliseconds of `run` as a CUDA graph. The caller has run it once, so its kernels are compiled.

    The minimum rather than the median, because other processes may use the GPU meanwhile.
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


class CudaClock:
    """Marks points in the current stream's work, to measure the time between them."""

    def mark(self) -> object:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: object, end: object) -> float:
        """Return the seconds from one mark to another, after waiting for both."""
        assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event), "expected marks"
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
