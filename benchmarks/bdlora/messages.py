"""How long an all-reduce takes on these GPUs, by size and method, in a CUDA graph as steps have it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from coserve.kernels.collectives.push_sum import PushShape
from coserve.model.parallel.mesh import GroupMesh, Mesh
from coserve.model.parallel.symmetric import PushSum

SIZES_KIB = (8, 64, 512, 1024, 2048, 4096, 8192, 16384, 32768)
PUSH_SHAPES = {
    "push_2048": PushShape(2048),
    "push_8192": PushShape(8192),
    "push_8192_split": PushShape(8192, pushers=512, adders=512),
    "two_shot_push": PushShape(8192, pushers=512, adders=256, copiers=256),
    "two_shot_push_16384": PushShape(16384, pushers=256, adders=192, copiers=192),
}
IN_GRAPH, REPLAYS = 10, 7


def all_reduce_us(mesh: Mesh) -> dict[str, float]:
    """Microseconds of each `METHOD.KIB`: bf16, the median of replays; sums are checked. All ranks call this. Empty
    without GPUs."""
    if not isinstance(mesh, GroupMesh) or not torch.cuda.is_available():
        return {}
    import torch.distributed._symmetric_memory as symmetric

    device = torch.device("cuda", torch.cuda.current_device())
    buffer = symmetric.empty(SIZES_KIB[-1] * 512, dtype=torch.bfloat16, device=device)
    symmetric.rendezvous(buffer, mesh.group)
    name, group = mesh.group.group_name, mesh.group
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = options.config.max_ctas = 32
    wide = dist.new_group(pg_options=options)

    def nccl(x: Tensor) -> Tensor:
        dist.all_reduce(x, group=group)
        return x

    def nccl_32(x: Tensor) -> Tensor:
        dist.all_reduce(x, group=wide)
        return x

    def one_shot(x: Tensor) -> Tensor:
        found: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(buffer[: x.numel()], x, "sum", name)
        return found

    def two_shot(x: Tensor) -> Tensor:
        own, out = buffer[: x.numel()].copy_(x), torch.empty_like(x)
        torch.ops.symm_mem.two_shot_all_reduce_out(own, "sum", name, out)
        return out

    methods: dict[str, Callable[[Tensor], Tensor]] = {
        "nccl": nccl,
        "nccl_32": nccl_32,
        "one_shot": one_shot,
        "two_shot": two_shot,
        "mesh": mesh.all_reduce,
    }
    for name_of_shape, shape in PUSH_SHAPES.items():
        methods[name_of_shape] = partial(_sum, PushSum(group, device, most=SIZES_KIB[-1] << 10, shape=shape))
    dist.barrier(group)
    found = dict[str, float]()
    for method, run in methods.items():
        least = 512 if method.startswith("two_shot_push") else 0  # a block for every rank
        for kib in (size for size in SIZES_KIB if size >= least):
            found[f"{method}.{kib}"] = _time(run, kib * 512, mesh, device)
    return found


def _sum(push: PushSum, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    push(x, out)
    return out


def _time(run: Callable[[Tensor], Tensor], numbers: int, mesh: Mesh, device: torch.device) -> float:
    """Of one message, whose sum is checked first, in a graph replayed with other numbers, too."""
    x = torch.zeros(numbers, dtype=torch.bfloat16, device=device)
    run(x.clone())
    torch.cuda.synchronize()
    graph, static = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        sums = [run(static.clone()) for _ in range(3)]
    for seed in range(20):
        drawn = [
            torch.randint(
                -9, 9, (numbers,), generator=torch.Generator(device).manual_seed(100 * seed + rank), device=device
            )
            for rank in range(mesh.size)
        ]
        static.copy_(drawn[mesh.rank])
        graph.replay()
        right = torch.stack(drawn).sum(0)
        for own in sums:
            assert torch.equal(own.long(), right), "expected the sum"
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
