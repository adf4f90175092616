"""The memory pool of training's CUDA graphs, beside other threads and after captures that fail. Run with
`pytest -m gpu`."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from coserve.kernels.gpu.capture import TRAINING_PRIORITY
from coserve.kernels.gpu.graph_memory import GraphMemory

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


def make_memory() -> GraphMemory:
    return GraphMemory(torch.cuda.Stream(DEVICE, priority=TRAINING_PRIORITY))


def test_what_another_thread_launches_on_the_streams_of_training_is_not_captured() -> None:
    memory, training = make_memory(), torch.cuda.Stream(DEVICE, priority=TRAINING_PRIORITY)
    count, x = torch.zeros(1, device=DEVICE), torch.ones(64, device=DEVICE)
    torch.cuda.synchronize()

    def load() -> None:
        with torch.cuda.stream(training):
            count.add_(1)
            training.synchronize()

    with ThreadPoolExecutor(1) as thread, torch.cuda.stream(training):

        def run() -> Tensor:
            half = x * 2
            thread.submit(load).result()
            return half + 1

        replay, found = memory.record(run)
        for _ in range(3):
            replay()
    torch.cuda.synchronize()
    assert count.item() == 1
    assert (found == 3).all()


def test_after_a_capture_that_fails_its_memory_is_free_again() -> None:
    memory, x = make_memory(), torch.ones(1 << 24, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(DEVICE)

    def run() -> Tensor:
        return x * 2 * (x * 3).sum().item()  # waits for the device, which a capture cannot

    with pytest.raises(RuntimeError):
        memory.record(run)
    del memory
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(DEVICE) <= before
    again = make_memory()
    replay, found = again.record(lambda: x + 1)
    replay()
    torch.cuda.synchronize()
    assert (found == 2).all()
