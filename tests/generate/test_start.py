"""From steps one by one to compiled ones: nothing is compiled twice, no text changes, and who refuses goes on."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from coserve.engine.warming.upgrade import Upgrade
from coserve.generate.execution import start
from coserve.generate.execution.eager import EagerExecutor
from coserve.generate.execution.start import COMPILED, Compilation, make_start
from coserve.generate.generator import Generator
from coserve.memory.kv import KvCache
from coserve.model.base import Base, wrap_base
from coserve.model.fused import FusedBase
from tests.support.compiling import ask, ask_all, steps
from tests.support.executors import eager
from tests.support.lora_backends import SEGMENTED
from tests.support.shelf import Shelf
from tests.support.tiny_models import tiny_model

OTHERS = ("something else",)


class Counting:
    """A backend that generates no code."""

    def __init__(self) -> None:
        self.traced = 0
        self.threads: set[int] = set()

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Sequence[object]]:
        self.traced += 1
        self.threads.add(threading.get_ident())
        return graph.forward


def refusing(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Sequence[object]]:
    raise NotImplementedError("no such operation")


def wrong(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Sequence[object]]:
    return lambda *args: [2 * part for part in graph.forward(*args)]


@pytest.fixture
def base() -> Base:
    return wrap_base(tiny_model("llama"), name="llama", eos_token_ids=())


def served(base: Base, kv: KvCache) -> Generator:
    return Generator(base, Shelf().store(), kv, eager(base, kv), max_running=8, step_tokens=64)


@pytest.mark.slow
def test_requests_that_run_go_on_compiled(base: Base) -> None:
    backend, kv = Counting(), KvCache.for_base(base, 1024, 16)
    expected: dict[str, list[int]] = {}
    gen = served(base, kv)
    ask_all(gen)
    steps(gen, expected)

    compilation = Compilation(FusedBase(base, backend=backend), kv, eager(base, kv), max_running=8)
    gen = served(base, kv)
    upgrade, found = Upgrade(compilation, gen, OTHERS), dict[str, list[int]]()
    ask_all(gen)
    steps(gen, found, 3)
    thread = threading.Thread(target=upgrade.compile)
    thread.start()
    while thread.is_alive():
        other: dict[str, list[int]] = {}
        beside = served(base, KvCache.for_base(base, 1024, 16))
        ask_all(beside)
        steps(beside, other)
        assert other == expected
    traced = backend.traced
    assert backend.threads == {thread.ident}
    assert not gen.prepare()
    assert upgrade.adopt() == (*OTHERS, COMPILED)
    ask(gen, "late", 5)
    ask(gen, "later", 1)
    while gen.prepare():
        pass
    steps(gen, found)
    assert {id: found[id] for id in expected} == expected
    again: dict[str, list[int]] = {}
    plain = served(base, kv)
    ask(plain, "late", 5)
    ask(plain, "later", 1)
    steps(plain, again)
    assert {id: found[id] for id in again} == again
    assert (backend.traced, backend.threads) == (traced, {thread.ident})


@pytest.mark.parametrize(
    ("backend", "why"),
    [(refusing, "torch.compile refuses llama"), pytest.param(wrong, "compiled, 13 rows", marks=pytest.mark.slow)],
)
def test_who_cannot_be_compiled_runs_on(base: Base, backend: Counting, why: str) -> None:
    kv = KvCache.for_base(base, 1024, 16)
    compilation = Compilation(FusedBase(base, backend=backend), kv, eager(base, kv), max_running=8)
    gen = served(base, kv)
    upgrade, found = Upgrade(compilation, gen, OTHERS), dict[str, list[int]]()
    upgrade.compile()
    other, note = upgrade.adopt()
    assert (other,) == OTHERS
    assert note.startswith("generation: steps run one by one, as torch.compile refuses")
    assert why in note
    assert not gen.prepare()
    ask_all(gen)
    steps(gen, found)
    assert {len(tokens) for tokens in found.values()} == {12}


@pytest.mark.parametrize("when", ["background", "before", "off"])
def test_nothing_is_compiled_without_a_gpu(base: Base, when: str) -> None:
    made = make_start(base, KvCache.for_base(base, 64, 16), max_running=4, lora_backend=SEGMENTED, when=when)
    assert isinstance(made.executor, EagerExecutor)
    assert (made.notes, made.compilation) == ((), None)


def test_a_compilation_without_memory_is_a_refusal_that_is_told(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: FusedBase) -> None:
        raise torch.OutOfMemoryError("no memory")

    kv = KvCache.for_base(base, 64, 16)
    compilation = Compilation(FusedBase(base, compiled=False), kv, eager(base, kv), max_running=4)
    monkeypatch.setattr(FusedBase, "check", full)
    compilation.compile()
    executor, notes = compilation.executor()
    assert executor is None
    assert "no memory" in notes[0]


def test_a_fault_in_the_compiling_thread_is_not_a_refusal(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: FusedBase) -> None:
        raise ZeroDivisionError

    kv = KvCache.for_base(base, 64, 16)
    compilation = Compilation(FusedBase(base, compiled=False), kv, eager(base, kv), max_running=4)
    monkeypatch.setattr(FusedBase, "check", broken)
    with pytest.raises(ZeroDivisionError):
        compilation.compile()
    with pytest.raises(AssertionError):
        compilation.executor()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="on CPU inductor needs a compiler")
def test_nothing_traced_beside_serving_fails_other_threads_modules(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """fx patches `nn.Module.__call__` for all threads while it traces: once the compiler is awake, only with tracers
    that call the module."""
    start.wake_compiler(base.device)
    tracers, real = list[type[torch.fx.Tracer]](), torch.fx.Tracer.trace

    def trace(self: torch.fx.Tracer, *args: object, **kwargs: object) -> torch.fx.Graph:
        tracers.append(type(self))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(torch.fx.Tracer, "trace", trace)
    with torch._inductor.config.patch(force_disable_caches=True):
        kv = KvCache.for_base(base, 64, 16)
        Compilation(FusedBase(base), kv, eager(base, kv), max_running=4).compile()
    assert tracers
    assert all(tracer.call_module is not torch.fx.Tracer.call_module for tracer in tracers)
