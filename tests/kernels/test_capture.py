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


def test_who_has_no_collector_gets_none() -> None:
    gc.disable()
    with captured(GRAPH):
        pass
    assert not gc.isenabled()
