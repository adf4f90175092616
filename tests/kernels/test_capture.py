"""Nothing is collected while a stream captures."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from typing import cast

import pytest
import torch

from coserve.kernels.gpu.capture import captured

GRAPH = cast(torch.cuda.CUDAGraph, None)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    yield
    gc.enable()


def test_the_collector_rests_and_comes_back() -> None:
    with captured(GRAPH):
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_comes_back_after_a_failure() -> None:
    with pytest.raises(ValueError, match="no kernel"), captured(GRAPH):
        raise ValueError("no kernel")
    assert gc.isenabled()


class Graph:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self.calls.append("begin")

    def capture_end(self) -> None:
        self.calls.append("end")


@pytest.mark.parametrize(("free", "emptied"), [(8 << 30, []), (64 << 20, ["emptied"])])
def test_torchs_cache_is_emptied_before_a_capture_only_where_little_memory_is_free(
    free: int, emptied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = Graph()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80 << 30))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: graph.calls.append("emptied"))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    with captured(cast(torch.cuda.CUDAGraph, graph), (0, 1), cast(torch.cuda.Stream, object())):
        graph.calls.append("inside")
    assert graph.calls == [*emptied, "begin", "inside", "end"]


def test_who_has_no_collector_gets_none() -> None:
    gc.disable()
    with captured(GRAPH):
        pass
    assert not gc.isenabled()
