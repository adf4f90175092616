"""Where the time of a step goes: kernels of the GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common.traces import busy, by_kernel, traced


def profiled(work: Callable[[], object], steps: int) -> dict[str, Any]:
    """Runs `work`, which does `steps` equal steps, under the profiler. Milliseconds and counts are of one step.

    `busy_ms`: in which a kernel ran; kernels that run at once count once. `by_kernel`: [name, ms, calls], the largest
    first.
    """
    seconds = list[float]()

    def timed() -> None:
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)

    kernels = traced(timed, torch.device("cuda"), host=False)
    found = {"steps": steps, "step_ms": 1e3 * seconds[0] / steps, "busy_ms": busy(kernels) / 1e3 / steps}
    found |= {"kernels": len(kernels) / steps}
    return {
        **{name: round(value, 4) for name, value in found.items()},
        "by_kernel": [[name, round(us / 1e3, 4), calls] for us, calls, name in by_kernel(kernels, steps)],
    }
