"""Compiled steps: nothing is compiled twice, no text changes, and what cannot be compiled runs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from coserve.generate.execution.eager import EagerExecutor
from coserve.generate.execution.interface import StepExecutor
from coserve.generate.execution.start import UNCHUNKED, CompiledSteps, check_compiled, make_start, recurrence_notes
from coserve.generate.generator import Generator
from coserve.kernels.recurrent.interface import StateShape
from coserve.memory.kv import KvCache
from coserve.model.base import Base, wrap_base
from coserve.model.fused import FusedBase
from tests.support.compiling import ask, ask_all, steps
from tests.support.executors import eager
from tests.support.lora_backends import SEGMENTED
from tests.support.shelf import Shelf
from tests.support.tiny_models import tiny_model


class Counting:
    """A backend that generates no code."""

    def __init__(self) -> None:
        self.traced = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Sequence[object]]:
        self.traced += 1
        return graph.forward


def refusing(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Sequence[object]]:
    raise NotImplementedError("no such operation")


def wrong(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Sequence[object]]:
    return lambda *args: [2 * part for part in graph.forward(*args)]


@pytest.fixture
def base() -> Base:
    return wrap_base(tiny_model("llama"), name="llama", eos_token_ids=())


def served(base: Base, kv: KvCache, executor: StepExecutor | None = None) -> Generator:
    return Generator(base, Shelf().store(), kv, executor or eager(base, kv), max_running=8, step_tokens=64)


@pytest.mark.slow
def test_compiled_steps_have_the_same_texts_and_compile_nothing_more(base: Base) -> None:
    kv, found = KvCache.for_base(base, 1024, 16), list[dict[str, list[int]]]()
    fused = FusedBase(base, backend=(backend := Counting()))
    assert check_compiled(fused) == ""
    traced = backend.traced
    executor = CompiledSteps(fused, eager(base, kv), 8, 64).executor(kv, capture=True)
    executor.warm_up()
    for gen in (served(base, KvCache.for_base(base, 1024, 16)), served(base, kv, executor)):
        found.append({})
        ask_all(gen)
        steps(gen, found[-1], 3)
        ask(gen, "late", 5)
        ask(gen, "later", 1)
        steps(gen, found[-1])
    assert found[0] == found[1]
    assert backend.traced == traced > 0


@pytest.mark.parametrize(
    ("backend", "why"),
    [(refusing, "torch.compile refuses llama"), pytest.param(wrong, "compiled, 13 rows", marks=pytest.mark.slow)],
)
def test_what_cannot_be_compiled_is_told(base: Base, backend: Counting, why: str) -> None:
    note = check_compiled(FusedBase(base, backend=backend))
    assert note.startswith("generation: steps run one by one, as torch.compile refuses")
    assert why in note


@pytest.mark.parametrize("compile", [True, False])
def test_nothing_is_compiled_without_a_gpu(base: Base, compile: bool) -> None:
    made = make_start(base, KvCache.for_base(base, 64, 16), max_running=4, lora_backend=SEGMENTED, compile=compile)
    assert isinstance(made.executor, EagerExecutor)
    assert (made.notes, made.graphs, made.compiled) == ((), None, None)


def test_a_compilation_without_memory_is_a_refusal_that_is_told(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: FusedBase) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(FusedBase, "check", full)
    assert "no memory" in check_compiled(FusedBase(base, compiled=False))


def test_a_fault_of_ours_is_not_a_refusal(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: FusedBase) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(FusedBase, "check", broken)
    with pytest.raises(ZeroDivisionError):
        check_compiled(FusedBase(base, compiled=False))


@pytest.mark.parametrize(
    ("keys", "values", "dtype", "noted"),
    [
        (128, 128, torch.bfloat16, False),
        (64, 64, torch.float16, False),
        (0, 0, torch.bfloat16, False),  # a convolution alone
        (128, 128, torch.float32, True),
        (32, 64, torch.bfloat16, True),
        (256, 64, torch.bfloat16, True),
        (128, 1, torch.bfloat16, True),
    ],
)
def test_a_note_says_which_recurrences_run_token_by_token(
    keys: int, values: int, dtype: torch.dtype, noted: bool
) -> None:
    base = wrap_base(tiny_model("llama"), name="tiny", eos_token_ids=())
    states = {0: StateShape(8, 4), 1: StateShape(20, 4, heads=4 * (keys > 0), keys=keys, values=values)}
    on_gpu = replace(base, states=states, dtype=dtype, device=torch.device("cuda"))
    assert recurrence_notes(on_gpu) == [UNCHUNKED] * noted
