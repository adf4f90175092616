"""Generation with layers that keep a recurrent state: chunks, neighbours, preemptions, lost memory change nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coserve.config import Config
from coserve.core.link.generation import Generate, RequestFailed
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef
from coserve.engine.threads import EXACT_THREADS, choose_threads
from coserve.generate.execution.interface import StepExecutor
from coserve.generate.generator import Generator
from coserve.memory.kv import KvCache
from coserve.model.base import Base, wrap_base
from coserve.model.fused import FusedBase
from tests.support.examples import examples, in_turns
from tests.support.executors import eager, graphs
from tests.support.families import tiny_family
from tests.support.generation import adapter, collect, prompt, request
from tests.support.lengths import OneMoreToken
from tests.support.memory_faults import out_of_memory_at
from tests.support.shelf import Shelf

REFS = (None, AdapterRef("a", 1), AdapterRef("b", 1))
LONG = {"max_position_embeddings": 128}


@cache
def base_of(family: str) -> Base:
    return wrap_base(tiny_family(family, **LONG), name=family, eos_token_ids=())


@cache
def shelf_of(family: str) -> Shelf:
    base = base_of(family)
    return Shelf({ref: adapter(base, i, 1 + 2 * i) for i, ref in enumerate(REFS) if ref is not None})


def requests(refs: tuple[AdapterRef | None, ...] = REFS) -> list[Generate]:
    """For the base and two adapters of odd ranks; some prompts are longer than a step."""
    sampling = [SamplingParams(max_tokens=10, temperature=0.7 * (i % 2), seed=i) for i in range(5)]
    return [request(str(i), prompt(3 + 13 * i, i), sampling[i], refs[i % len(refs)]) for i in range(5)]


def generator(family: str, executor: StepExecutor | None = None, *, step_tokens: int = 48, **sizes: int) -> Generator:
    base, tokens, most = base_of(family), sizes.get("tokens", 8192), sizes.get("max_running", 8)
    kv = KvCache.for_base(base, tokens, 4, sequences=most)
    store, made = shelf_of(family).store(), executor or eager(base, kv)
    return Generator(base, store, kv, made, max_running=most, step_tokens=step_tokens, lengths=OneMoreToken())


@pytest.mark.parametrize("family", in_turns(["qwen3_5_text", "nemotron_h", "jamba", "lfm2"], ["qwen3_5_text"]))
@pytest.mark.filterwarnings("ignore")
def test_neighbours_chunks_and_preemptions_change_no_token(family: str) -> None:
    for refs, shapes in ((REFS, ({}, {"step_tokens": 9}, {"max_running": 2})), ((None,), ({"tokens": 68},))):
        asked = requests(refs)
        expected = {id: said for one in asked for id, said in collect(generator(family), [one]).items()}
        for sizes in shapes:
            gen = generator(family, **sizes)
            assert collect(gen, asked) == expected, sizes
    assert gen.scheduler.preemptions > 0


@settings(max_examples=examples(20, fast=2), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 55), min_size=2, max_size=5),
    tokens=st.integers(68, 140),
    step=st.integers(1, 48),
    running=st.integers(1, 5),
)
@pytest.mark.filterwarnings("ignore")
def test_any_lengths_in_any_room_give_the_same_tokens(lengths: list[int], tokens: int, step: int, running: int) -> None:
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    asked = [request(str(i), prompt(length, i), sampling) for i, length in enumerate(lengths)]
    expected = {id: said for one in asked for id, said in collect(generator("qwen3_5_text"), [one]).items()}
    gen = generator("qwen3_5_text", tokens=tokens, step_tokens=step, max_running=running)
    assert collect(gen, asked) == expected
    assert gen.pages_used == 0


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_ran_out_of_memory_halfway_is_computed_again() -> None:
    """Its first layers have advanced their states already."""
    family = "qwen3_5_text"
    expected = collect(generator(family), requests())
    layer = type(base_of(family).layers[0])
    for wanted in (4, 11):
        with out_of_memory_at([(layer, "forward")], lambda call, wanted=wanted: call == wanted) as faults:
            found = collect(generator(family), requests())
        assert faults.failed
        assert {id: tokens for id, (tokens, _) in found.items()} == {id: tokens for id, (tokens, _) in expected.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_steps_in_fixed_buffers_give_the_same_tokens() -> None:
    """As CUDA graphs run them, with layers that are traced, but not compiled; the second time from snapshots."""
    family, base, traced = "qwen3_5_text", base_of("qwen3_5_text"), list[str]()

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        traced.append(graph.code)
        return graph.forward

    asked = [request(str(i), prompt(5 + 20 * i, i)) for i in range(4)]
    expected = collect(generator(family), asked)
    kv = KvCache.for_base(base, 2048, 16, sequences=4)
    executor = graphs(FusedBase(base, backend=backend), kv, max_running=4)
    gen = Generator(base, shelf_of(family).store(), kv, executor, max_running=4, step_tokens=32)
    for _ in range(2):
        for one in asked:
            gen.add(one)
        found: dict[str, list[int]] = {one.id: [] for one in asked}
        while gen.running or gen.in_flight:
            for message in gen.step():
                assert not isinstance(message, RequestFailed), message
                found[message.id] += message.tokens
        assert found == {id: tokens for id, (tokens, _) in expected.items()}
    assert gen.scheduler.active.prefix_hits == 16 + 48
    assert any("coserve.recur" in code for code in traced)
    assert not any("repeat_interleave" in code for code in traced), "the recurrence reads the heads that there are"


@pytest.mark.filterwarnings("ignore")
def test_the_engine_times_a_forward_to_choose_its_threads() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(EXACT_THREADS + 1)
        choose_threads(base_of("qwen3_5_text"), Config())
        assert torch.get_num_threads() <= EXACT_THREADS
    finally:
        torch.set_num_threads(before)
