"""Steps with prompts padded into fixed buffers: the same texts, pages and logits. On CPU nothing is captured."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef
from coserve.generate.execution.adapter_slots import AdapterSlots
from coserve.generate.execution.footprint import NO_ADAPTERS
from coserve.generate.execution.graph_executor import GraphExecutor
from coserve.generate.execution.graph_sizes import (
    DECODE_KERNEL_TOKENS,
    MIXED_TOKENS,
    mixed_capacities,
    mixed_tile_capacities,
)
from coserve.generate.execution.graphs.mixed import MixedGraph, Rows
from coserve.generate.execution.graphs.shared import GraphState, LogitsBuffer
from coserve.generate.execution.slot_lora import slot_lora
from coserve.generate.execution.token_slots import TokenSlots
from coserve.generate.generator import Generator
from coserve.generate.sampling.sampler import send_ids
from coserve.kernels.attention.interface import MixedCapacity, TokenRun
from coserve.kernels.lora.segments import Segments
from coserve.kernels.sampling.constants import NOT_FINITE
from coserve.memory.kv import KvCache
from coserve.model.base import Base, wrap_base
from coserve.model.fused import FusedBase
from tests.support.examples import by_day, examples
from tests.support.executors import eager, graphs
from tests.support.generation import adapter, collect, prompt, request
from tests.support.lengths import OneMoreToken
from tests.support.shelf import Shelf, named
from tests.support.step_recorder import StepRecorder
from tests.support.tiny_models import VOCAB, tiny_model

SHORT = SamplingParams(max_tokens=4, temperature=0.0)


def fused_base(family: str) -> FusedBase:
    return FusedBase(wrap_base(tiny_model(family), name=family, eos_token_ids=()), compiled=False)


shared_base = cache(fused_base)


@pytest.fixture(scope="module")
def llama() -> FusedBase:
    return shared_base("llama")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> StepRecorder:
    return StepRecorder(monkeypatch)


def generator(
    fused: FusedBase,
    shelf: Shelf | None = None,
    *,
    prepared: bool,
    graph_tokens: int = 2048,
    tokens: int = 2048,
    step_tokens: int = 256,
    ranks: tuple[int, ...] = (),
) -> Generator:
    kv = KvCache.for_base(fused.base, tokens, 4)
    executor = GraphExecutor(
        fused, kv, eager(fused.base, kv), max_running=16, step_tokens=graph_tokens, capture=prepared
    )
    executor.warm_up(ranks)
    return Generator(
        fused.base,
        (shelf or Shelf()).store(),
        kv,
        executor,
        max_running=16,
        step_tokens=step_tokens,
        lengths=OneMoreToken(),
    )


@pytest.mark.parametrize("family", by_day(["llama", "mistral", "gemma2"], "gemma2"))
def test_texts_are_those_of_packed_steps(family: str, steps: StepRecorder) -> None:
    """In chunks beside decodes, of one token, beginning as another began (prefix hits), in windows."""
    fused, begun = fused_base(family), prompt(30)
    drawn = SamplingParams(max_tokens=5, temperature=1.3, top_p=0.9, frequency_penalty=0.3, seed=3)
    requests = [request(str(n), prompt(n), SHORT) for n in (1, 2, 17, 40)] + [request("drawn", prompt(23), drawn)]
    again = [request("whole", begun, SHORT), request("longer", (*begun, *prompt(9)), SHORT)]
    for changes in ({}, {"step_tokens": 13}, {"tokens": 48}):
        plain, padded = (generator(fused, prepared=prepared, **changes) for prepared in (False, True))
        expected = [collect(plain, [request("first", begun, SHORT)]), collect(plain, requests + again)]
        assert not steps.graphs
        steps.others = 0
        assert [collect(padded, [request("first", begun, SHORT)]), collect(padded, requests + again)] == expected
        assert steps.graphs
        assert not steps.others
        assert all(size == next(b for b in MIXED_TOKENS if b >= tokens) for tokens, size in steps.graphs)
        steps.graphs.clear()
        assert bool(padded.scheduler.preemptions) == ("tokens" in changes)


@pytest.mark.slow
def test_adapters_of_several_ranks(llama: FusedBase, steps: StepRecorder) -> None:
    refs = [AdapterRef(f"a{i}", 1) for i in range(3)]
    ranks = 4, 1, 20
    shelf = Shelf({ref: adapter(llama.base, i, rank) for i, (ref, rank) in enumerate(zip(refs, ranks, strict=True))})
    chosen = [refs[0], None, refs[1], refs[2]]
    few = SamplingParams(max_tokens=2, temperature=0.0)
    requests = [request(str(i), prompt(2 + 3 * i), few, ref) for i, ref in enumerate(chosen)]
    requests += [request("none", prompt(3), few), request("narrow", prompt(9), few, refs[1])]

    def texts(gen: Generator) -> list[object]:
        return [collect(gen, requests[:4]), collect(gen, requests[4:5]), collect(gen, requests[5:])]

    expected = texts(generator(llama, shelf, prepared=False, step_tokens=14))
    assert texts(generator(llama, shelf, prepared=True, graph_tokens=32, step_tokens=14, ranks=(3, 32))) == expected
    assert len(steps.graphs) > 3


def test_what_no_graph_holds_runs_packed(llama: FusedBase, steps: StepRecorder) -> None:
    """Steps of more tokens than the largest, and of more prompts."""
    requests = [request(str(n), prompt(n), SHORT) for n in (70, 3)] + [request("few", prompt(8), SHORT)]
    gen = generator(llama, prepared=True, graph_tokens=32)
    assert collect(gen, requests) == collect(generator(llama, prepared=False), requests)
    assert not steps.graphs
    many = [request(str(n), prompt(2, n), SHORT) for n in range(6)]
    assert collect(gen, many) == collect(generator(llama, prepared=False), many)
    assert not steps.graphs
    assert collect(gen, requests[1:]) == collect(generator(llama, prepared=False), requests[1:])
    assert steps.graphs == [(3 + 8 - 4, 32)], "the first page of the 8 is found"


@pytest.mark.slow
def test_widths_that_steps_had_are_prepared_too(llama: FusedBase, steps: StepRecorder) -> None:
    ref = AdapterRef("wide", 1)
    gen = generator(llama, Shelf({ref: adapter(llama.base, 0, 20)}), prepared=True, graph_tokens=32)
    while gen.prepare():
        pass
    first = collect(gen, [request("a", prompt(5), SHORT, ref)])
    assert (steps.graphs, steps.others) == ([], 4)
    assert gen.prepare()
    while gen.prepare():
        pass
    again = collect(gen, [request("a", prompt(5, 1), SHORT, ref)])
    assert (steps.graphs, steps.others) == ([(5, 32)], 4)
    assert len(first["a"][0]) == len(again["a"][0])


def test_while_a_size_is_missing_the_next_one_serves_and_none_beyond_that(
    llama: FusedBase, steps: StepRecorder
) -> None:
    kv, one = KvCache.for_base(llama.base, 2048, 4), SamplingParams(max_tokens=1, temperature=0.0)
    executor = graphs(llama, kv, prepared=False, max_running=16, step_tokens=128)
    for _ in range(3):  # the sampler, and the largest graphs: of decodes, and of prompts
        assert executor.prepare(())
    gen = Generator(llama.base, Shelf().store(), kv, executor, max_running=16, step_tokens=128)
    collect(gen, [request("a", prompt(50), one)])
    assert (steps.graphs, steps.others) == ([(50, 128)], 0)
    collect(gen, [request("a", prompt(5), one)])
    assert (steps.graphs, steps.others) == ([(50, 128)], 1)


def worst(tokens: int, sequences: int, rows: int) -> list[int]:
    """Lengths of runs that take the most tiles: as many runs as there are sequences, each one row over whole tiles."""
    lengths = [1] * sequences
    for at in range(sequences):
        while sum(lengths) + rows <= tokens and lengths[at] < tokens:
            lengths[at] += rows
    return lengths


@given(st.integers(1, 5000), st.integers(1, 300))
def test_capacities_for_every_step(step_tokens: int, sequences: int) -> None:
    capacities = mixed_capacities(step_tokens, sequences, 100)
    assert [capacity.tokens for capacity in capacities] == list(MIXED_TOKENS[: len(capacities)])
    assert capacities[-1].tokens >= min(step_tokens, MIXED_TOKENS[-1])
    assert len(capacities) == 1 or capacities[-2].tokens < step_tokens
    for capacity in capacities:
        assert 1 <= capacity.chunks <= capacity.sequences <= min(sequences, capacity.tokens)
        found = mixed_tile_capacities(capacity.tokens, capacity.sequences)
        rows = 8 if capacity.tokens <= DECODE_KERNEL_TOKENS or capacity.sequences > -(-capacity.tokens // 64) else 64
        tiles = [one.tiles for one in found]
        assert tiles == sorted(set(tiles))
        assert found[-1].rows == rows and {one.rows for one in found[:-1]} <= {rows, 64}
        all_apart = sum(-(-length // rows) for length in worst(capacity.tokens, capacity.sequences, rows))
        assert tiles[-1] >= all_apart, "a tile is missing where each has an adapter"


class Step:
    """One step on a base of its own pages: what `mix` says, with random tokens, twice over the same contents."""

    def __init__(self, base: Base, mix: list[tuple[int, int]], seed: int) -> None:
        """`mix`: (position, new tokens)."""
        g = torch.Generator().manual_seed(seed)
        self.kv = KvCache.for_base(base, 4 * 160, 4)
        self.kv.buffer.bytes.view(torch.float32).normal_(generator=g)
        order = torch.randperm(160, generator=g).tolist()
        self.runs = []
        for position, tokens in mix:
            pages = tuple(order.pop() for _ in range(-(-(position + tokens) // 4)))
            self.runs.append(TokenRun(tokens, position, pages))
        total = sum(tokens for _, tokens in mix)
        ids = torch.randint(3, VOCAB, (total,), generator=g).tolist()
        positions = [p for position, tokens in mix for p in range(position, position + tokens)]
        keep = [row - 1 for row in torch.tensor([run.tokens for run in self.runs]).cumsum(0).tolist()]
        in_flight = [row if run.tokens == 1 else -1 for run, row in zip(self.runs, keep, strict=True)]
        self.token_slots = TokenSlots(torch.device("cpu"), 32)
        last = self.token_slots.tokens.copy_(torch.randint(3, VOCAB, (32,), generator=g))
        slots = [in_flight.index(row) + 1 if row in in_flight else 0 for row in range(total)]
        self.known = [int(last[slot]) if slot else token for token, slot in zip(ids, slots, strict=True)]
        given_ = [NOT_FINITE if slot else token for token, slot in zip(ids, slots, strict=True)]
        to = list(range(1, len(mix) + 1))
        self.rows = Rows(given_, slots, positions, keep, to)


@settings(max_examples=examples(8))
@given(
    mix=st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 2, 5, 13])), min_size=1, max_size=8),
    seed=st.integers(0, 1000),
    adapters=st.sampled_from(["none", "decode tiles", "prefill tiles"]),
)
@pytest.mark.parametrize("family", by_day(["llama", "mistral"]))
def test_padding_changes_neither_pages_nor_logits(
    family: str, mix: list[tuple[int, int]], seed: int, adapters: str
) -> None:
    fused = shared_base(family)
    one, two = (Step(fused.base, mix, seed) for _ in range(2))
    slots = AdapterSlots(fused.groups, 4, fused.base.device)
    segments = None
    if adapters != "none":
        held = [adapter(fused.base, seed + i, rank) for i, rank in enumerate((3, 16))]
        cuts = sorted({0, len(one.known), *(min(len(one.known), at) for at in (4, 9))})
        segments = Segments(tuple(cuts), tuple([*slots.place(named(held)), -1][: len(cuts) - 1]))
    lora = None if segments is None else slot_lora(slots, segments)
    tokens_T, positions_T, keep_R = send_ids(fused.base.device, one.known, one.rows.positions, one.rows.keep)
    expected = fused.forward(tokens_T, positions_T, one.kv.attention(one.runs), lora=lora, keep=keep_R)
    attention = two.kv.mixed_attention(MixedCapacity(tokens=128, sequences=9, chunks=8, context=80))
    footprint = NO_ADAPTERS if segments is None else slots.footprint(segments)
    state = GraphState(fused, two.token_slots, slots, LogitsBuffer(12), None)
    most = 0 if adapters == "prefill tiles" else DECODE_KERNEL_TOKENS
    graph = MixedGraph(state, attention, footprint, decode_kernel_tokens=most)
    for _ in range(2):  # a step's own keys and values are written twice
        logits, chosen = graph.run(two.rows, two.runs, segments)
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)
        assert chosen.tolist() == logits.argmax(-1).tolist()
        assert two.token_slots.tokens[1 : len(mix) + 1].tolist() == chosen.tolist()
        before, after = (step.kv.buffer.bytes.view(torch.float32) for step in (one, two))
        torch.testing.assert_close(after, before, atol=2e-4, rtol=2e-4)
        two.token_slots.tokens.copy_(one.token_slots.tokens)
