"""Timing: on a GPU a CUDA graph of many calls over rotating inputs, replayed between two events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from coserve.kernels.gpu.timing import graph_ms


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median over replays, the fastest and the slowest."""

    us: float
    low: float
    high: float

    def record(self) -> dict[str, float]:
        return {"us": round(self.us, 3), "low": round(self.low, 3), "high": round(self.high, 3)}


def graph_us(calls: Sequence[Callable[[], object]], *, replays: int = 15, repeat: int = 1) -> Timing:
    """Mean microseconds of a call when `calls` (one an input set) run in one graph, `repeat` times over.

    The sets together should hold more than the 50 MB of L2, so that each call reads its inputs from memory.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            for call in calls:
                call()
    graph.replay()
    torch.cuda.synchronize()
    spans = [_replay_ms(graph) * 1e3 / (len(calls) * repeat) for _ in range(replays)]
    return Timing(median(spans), min(spans), max(spans))


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def event_us(calls: Sequence[Callable[[], object]], *, rounds: int = 10) -> Timing:
    """As `graph_us` for work that cannot be captured: eager, the host's overhead included."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    spans = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        spans.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return Timing(median(spans), min(spans), max(spans))


def microseconds(run: Callable[[], object], device: torch.device, parts: int = 1) -> float:
    """Of one of the equal `parts` of `run`, in a CUDA graph; without a GPU of its only call."""
    began = time.perf_counter()
    run()
    if device.type != "cuda":
        return 1e6 * (time.perf_counter() - began) / parts
    return 1e3 * graph_ms(lambda: (run(), None)[1]) / parts


def synchronize(device: torch.device | str) -> None:
    """Wait for a GPU; nothing to wait for elsewhere."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def steps_tok_s(train: Callable[[int], int], device: torch.device | str, repeats: int) -> list[float]:
    """Tokens a second of training steps, after two that are not timed. `train` runs one and returns its tokens."""
    found = list[float]()
    for run in range(2 + repeats):
        synchronize(device)
        began = time.perf_counter()
        tokens = train(run)
        synchronize(device)
        found.append(tokens / (time.perf_counter() - began))
    return found[2:]
