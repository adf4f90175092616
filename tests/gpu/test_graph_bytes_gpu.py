"""What captures take is told from what threads allocate beside them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from coserve.generate.execution.graphs.shared import make_graph_pool
from coserve.kernels.gpu.capture import captured
from coserve.memory.graph_bytes import CudaMemory, GraphBytes

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def test_a_thread_allocates_while_a_graph_is_captured() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    pool = make_graph_pool(device)
    assert pool is not None
    graphs, x, graph = GraphBytes(CudaMemory(device)), torch.ones(64 * MIB, device=device), torch.cuda.CUDAGraph()
    with ThreadPoolExecutor(1) as thread:
        with graphs.capturing(pool):
            pool.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(pool.stream):
                warm = x + 1
            job = thread.submit(torch.empty, 1024 * MIB, dtype=torch.uint8, device=device).result()
        with graphs.capturing(pool):
            with captured(graph, pool.memory, pool.stream):
                y = x + 2
            more = thread.submit(torch.empty, 1024 * MIB, dtype=torch.uint8, device=device).result()
    graph.replay()
    assert int(y[0]) == 3 and int(warm[0]) == 2 and len(job) == len(more)
    assert 512 * MIB <= graphs.size < 700 * MIB, "a tensor of 256 MiB each, and the driver's part"
