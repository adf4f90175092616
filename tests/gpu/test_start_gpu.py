"""Compiled steps and their graphs, captured before and between steps, on a GPU. Run with `pytest -m gpu`."""

from __future__ import annotations

import pytest
from torch._dynamo.utils import counters

from coserve.generate.execution.start import COMPILED, make_start
from coserve.generate.generator import Generator
from coserve.memory.kv import KvCache
from tests.support.compiling import ask, ask_all, steps
from tests.support.executors import eager
from tests.support.families import tiny_family
from tests.support.gpu_engine import gpu_base
from tests.support.lora_backends import SEGMENTED
from tests.support.shelf import Shelf
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_requests_have_the_same_texts_compiled_and_graphed(family: str) -> None:
    base = gpu_base(tiny_model(family))
    kv = KvCache.for_base(base, 1024, 16)

    def plain() -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        gen = Generator(base, Shelf().store(), kv, eager(base, kv, SEGMENTED), max_running=8, step_tokens=64)
        ask_all(gen)
        steps(gen, found)
        return found

    expected = plain()
    start = make_start(base, kv, max_running=8, lora_backend=SEGMENTED, compile=True)
    assert start.notes == (COMPILED,) and start.graphs is start.executor and start.compiled is not None
    compiled = counters["stats"]["unique_graphs"]
    gen, found = (
        Generator(base, Shelf().store(), kv, start.executor, max_running=8, step_tokens=64),
        dict[str, list[int]](),
    )
    ask_all(gen)
    steps(gen, found, 3)
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


def test_experts_in_float32_run_without_graphs_and_say_so() -> None:
    """The host reads where each expert's rows end."""
    base = gpu_base(tiny_family("mixtral"))
    kv = KvCache.for_base(base, 1024, 16)
    start = make_start(base, kv, max_running=8, lora_backend=SEGMENTED, compile=True)
    assert start.graphs is None and "unless the base is bfloat16" in start.notes[0]
    gen = Generator(base, Shelf().store(), kv, start.executor, max_running=8, step_tokens=64)
    found = dict[str, list[int]]()
    ask_all(gen)
    steps(gen, found)
    assert {len(tokens) for tokens in found.values()} == {12}
