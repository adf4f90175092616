"""The memory pool of training's CUDA graphs makes room once a pass."""

from __future__ import annotations

from contextlib import nullcontext
from typing import cast

import pytest
import torch

from coserve.kernels.gpu.graph_memory import GraphMemory


class Stream:
    device = 0

    def wait_stream(self, other: object) -> None:
        pass


class Device:
    def __init__(self) -> None:
        self.free, self.emptied = 8 << 30, 0

    def empty(self) -> None:
        self.emptied += 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    one = Device()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (one.free, 80 << 30))
    monkeypatch.setattr(torch.cuda, "empty_cache", one.empty)
    monkeypatch.setattr(torch.cuda, "MemPool", object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    for name in ("stream", "use_mem_pool"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    return one


def test_torchs_cache_is_emptied_at_most_once_a_pass(device: Device) -> None:
    memory = GraphMemory(cast(torch.cuda.Stream, Stream()))
    for passes in (1, 2):
        in_pool = memory.pool_of_pass()
        device.free = 8 << 30
        with in_pool():
            pass
        assert device.emptied == passes - 1, "there is enough"
        device.free = 64 << 20  # layers keep more and more
        for _ in range(9):
            with in_pool():
                pass
        assert device.emptied == passes, (
            "what it freed, the pass has; the next step would allocate again what this frees"
        )
