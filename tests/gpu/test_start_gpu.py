"""Compilation beside serving, and graphs one at a time, on a GPU. Run with `pytest -m gpu`."""

from __future__ import annotations

import threading

import pytest
from torch._dynamo.utils import counters

from coserve.engine.warming.upgrade import Upgrade
from coserve.generate.execution.eager import EagerExecutor
from coserve.generate.execution.start import COMPILING, make_start
from coserve.generate.generator import Generator
from coserve.memory.kv import KvCache
from tests.support.compiling import ask, ask_all, steps
from tests.support.executors import eager
from tests.support.gpu_engine import gpu_base
from tests.support.lora_backends import SEGMENTED
from tests.support.shelf import Shelf
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_requests_that_run_go_on_compiled_and_graphed(family: str) -> None:
    base = gpu_base(tiny_model(family))
    kv = KvCache.for_base(base, 1024, 16)

    def plain() -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        gen = Generator(base, Shelf().store(), kv, eager(base, kv, SEGMENTED), max_running=8, step_tokens=64)
        ask_all(gen)
        steps(gen, found)
        return found

    expected = plain()
    start = make_start(base, kv, max_running=8, lora_backend=SEGMENTED, when="background")
    assert isinstance(start.executor, EagerExecutor)
    assert start.notes == (COMPILING,)
    assert start.compilation is not None
    gen, found = (
        Generator(base, Shelf().store(), kv, eager(base, kv, SEGMENTED), max_running=8, step_tokens=64),
        dict[str, list[int]](),
    )
    upgrade = Upgrade(start.compilation, gen, ())
    ask_all(gen)
    steps(gen, found, 3)
    thread = threading.Thread(target=upgrade.compile)
    thread.start()
    while thread.is_alive():
        assert plain() == expected
    upgrade.adopt()
    compiled = counters["stats"]["unique_graphs"]
    pieces = 0
    while gen.prepare():
        pieces += 1
        ask(gen, f"beside{pieces}", 3 + pieces % 40)
        steps(gen, found, 2)
    assert pieces > 4
    steps(gen, found)
    assert {id: found[id] for id in expected} == expected
    assert {len(tokens) for tokens in found.values()} == {12}
    assert counters["stats"]["unique_graphs"] == compiled
    assert plain() == expected
