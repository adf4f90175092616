"""How long an all-reduce takes on these GPUs, by size and method, in a CUDA graph as steps have it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from coserve.parallel.mesh import GroupMesh, Mesh

SIZES_KIB = (8, 64, 512, 1024, 2048, 4096, 8192, 16384, 32768)
IN_GRAPH, REPLAYS = 10, 7
METHODS = ("nccl", "one_shot", "two_shot")


def all_reduce_us(mesh: Mesh) -> dict[str, float]:
    """Microseconds of each `METHOD.KIB`: bf16, the median of replays. All ranks call this. Empty without GPUs."""
    if not isinstance(mesh, GroupMesh) or not torch.cuda.is_available():
        return {}
    import torch.distributed._symmetric_memory as symmetric

    device = torch.device("cuda", torch.cuda.current_device())
    buffer = symmetric.empty(SIZES_KIB[-1] * 512, dtype=torch.bfloat16, device=device)
    symmetric.rendezvous(buffer, mesh.group)
    name, group = mesh.group.group_name, mesh.group

    def nccl(x: Tensor) -> None:
        dist.all_reduce(x, group=group)

    def one_shot(x: Tensor) -> None:
        torch.ops.symm_mem.one_shot_all_reduce_copy(buffer[: x.numel()], x, "sum", name)

    def two_shot(x: Tensor) -> None:
        own = buffer[: x.numel()].copy_(x)
        torch.ops.symm_mem.two_shot_all_reduce_(own, "sum", name)
        x.copy_(own)

    found = dict[str, float]()
    for kib in SIZES_KIB:
        for method, run in zip(METHODS, (nccl, one_shot, two_shot), strict=True):
            found[f"{method}.{kib}"] = _time(run, torch.randn(kib * 512, dtype=torch.bfloat16, device=device) * 1e-6)
    return found


def _time(run: Callable[[Tensor], None], x: Tensor) -> float:
    run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(IN_GRAPH):
            run(x)
    times = []
    for _ in range(REPLAYS + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / (5 * IN_GRAPH))
    return round(1e6 * statistics.median(times[2:]), 2)
