"""Steps launch LoRA terms only for the groups of sites that their adapters change."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef
from coserve.generate.execution.adapter_slots import AdapterSlots
from coserve.generate.execution.footprint import NO_ADAPTERS, GraphFootprints, LoraFootprint
from coserve.generate.execution.graph_executor import GraphExecutor
from coserve.generate.execution.graphs.graph_set import covering_graph
from coserve.generate.generator import Generator
from coserve.kernels.lora.segmented.slot_lora import SlotLora
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair, SiteGroup
from coserve.lora.store.files import prefix_pairs
from coserve.lora.store.packing import PackedSites, PartedSites, packed
from coserve.memory.kv import KvCache
from coserve.model.base import wrap_base
from coserve.model.fused import FusedBase
from coserve.model.lora import LoraWeights
from tests.support.executors import eager, graphs
from tests.support.generation import adapter, collect, prompt, request
from tests.support.shelf import Shelf, named
from tests.support.tiny_models import tiny_model

SHORT = SamplingParams(max_tokens=4, temperature=0.0)
QKV, O, GATE_UP, DOWN = 0, 1, 2, 3
"""Groups of a llama layer."""
ALL = frozenset({QKV, O, GATE_UP, DOWN})
SITES = {
    "qv": (("q_proj", "v_proj"), {QKV}),
    "o": (("o_proj",), {O}),
    "mlp": (("gate_proj", "down_proj"), {GATE_UP, DOWN}),
    "all": (("proj",), {QKV, O, GATE_UP, DOWN}),
}


@pytest.fixture(scope="module")
def fused() -> FusedBase:
    return FusedBase(wrap_base(tiny_model("llama"), name="llama", eos_token_ids=()), compiled=False)


def part(fused: FusedBase, kind: str, rank: int = 4) -> LoraWeights:
    whole = adapter(fused.base, len(kind), rank)
    ends = SITES[kind][0]
    return LoraWeights(whole.settings, {name: pair for name, pair in whole.sites.items() if name.endswith(ends)})


def test_graphs_with_exchanges_serve_steps_with_exchanges_alone() -> None:
    """Servers answer the steps that they are told of."""
    with_servers, without = (LoraFootprint(16, ALL, remote=remote) for remote in (True, False))
    assert with_servers.covers(replace(with_servers, groups=frozenset({O})))
    assert not with_servers.covers(without) and not without.covers(with_servers)


def generator(
    fused: FusedBase, kinds: Sequence[str], *, ahead: bool = True, prepared: bool = True
) -> tuple[Generator, GraphExecutor]:
    kv = KvCache.for_base(fused.base, 1024, 16)
    executor = graphs(fused, kv, prepared=prepared, max_running=4)
    shelf = Shelf({AdapterRef(kind, 1): part(fused, kind) for kind in kinds})
    own = executor if ahead else eager(fused.base, kv)
    return Generator(fused.base, shelf.store(), kv, own, max_running=4, step_tokens=64), executor


def asks(*kinds: str) -> list[object]:
    return [request(kind, prompt(3 + 4 * i), SHORT, AdapterRef(kind, 1)) for i, kind in enumerate(kinds)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "prepared"), [(("qv",), True), (("qv", "o"), False), (("mlp",), True), (("all",), False)]
)
def test_only_changed_groups_are_launched(
    fused: FusedBase, kinds: tuple[str, ...], prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With graphs of their own and without any, the texts are those of the plain way."""
    gen, _ = generator(fused, kinds, prepared=prepared)
    groups: set[int] = set()
    add = SlotLora.add_

    def watched(self: SlotLora, group: SiteGroup, *args: Any, **kwargs: Any) -> None:
        groups.add(group.index)
        add(self, group, *args, **kwargs)

    monkeypatch.setattr(SlotLora, "add_", watched)
    found = collect(gen, asks(*kinds))
    assert groups == set().union(*(SITES[kind][1] for kind in kinds))
    assert found == collect(generator(fused, kinds, ahead=False)[0], asks(*kinds))


@pytest.mark.slow
def test_a_wider_graph_serves_until_its_own_is_captured(fused: FusedBase) -> None:
    gen, executor = generator(fused, ["qv"], prepared=False)
    executor.warm_up()
    warm = executor.decode_graphs
    collect(gen, asks("qv"))
    assert executor.decode_graphs == warm
    while gen.prepare():
        pass
    assert {footprint for _, footprint in executor.decode_graphs[len(warm) :]} == {LoraFootprint(16, frozenset({QKV}))}


@pytest.mark.parametrize(("rank", "dora"), [(40, False), (4, True), (4, False), (300, False)])
async def test_graphs_of_an_adapter_are_captured_once_it_is_read(fused: FusedBase, rank: int, dora: bool) -> None:
    """Before its first request, where the engine has nothing else to do."""
    weights = part(fused, "qv", rank)
    weights = replace(weights, settings=msgspec.structs.replace(weights.settings, use_dora=dora))
    kv, shelf = KvCache.for_base(fused.base, 1024, 16), Shelf({AdapterRef("a", 1): weights})
    executor, store = graphs(fused, kv, max_running=4), shelf.store()
    executor.warm_up()
    warm = executor.decode_graphs
    gen = Generator(fused.base, store, kv, executor, max_running=4, step_tokens=64)
    read = asyncio.Event()
    store.notify(read.set)
    store.prefetch(AdapterRef("a", 1))
    await read.wait()
    while gen.prepare():
        pass
    own = frozenset({QKV})
    expected = {40: {LoraFootprint(64, own)}, 4: {LoraFootprint(16, own, scaled=dora)}, 300: set()}
    assert {footprint for _, footprint in executor.decode_graphs[len(warm) :]} == expected[rank]


class OnlyLaidOut(PartedSites):
    """No pair of it is read."""

    def __getitem__(self, name: str) -> LoraPair:
        raise AssertionError(f"{name} is copied, though the layout says all")


def test_graphs_are_expected_by_the_layout_alone(fused: FusedBase) -> None:
    """Copying the pairs would hold up the engine for as long as reading the adapter. A KV prefix beside them plays no
    part, however long it is."""
    kv = KvCache.for_base(fused.base, 1024, 16)
    executor = graphs(fused, kv, max_running=4)
    executor.warm_up()
    warm = executor.decode_graphs
    lora, width = part(fused, "qv", 40), sum(2 * site.in_features for site in fused.base.spec.prefixes.values())
    sites = {**lora.sites, **prefix_pairs(fused.base.spec, torch.zeros(300, width))}
    copy = packed(LoraWeights(lora.settings, sites), for_kernels=False)
    assert isinstance(copy.sites, PackedSites)
    executor.kept(LoraWeights(copy.settings, OnlyLaidOut([copy.sites.memory_N], copy.sites.layout)))
    while executor.prepare():
        pass
    assert {footprint for _, footprint in executor.decode_graphs[len(warm) :]} == {LoraFootprint(64, frozenset({QKV}))}


def test_ranks_of_one_choice_of_groups_do_not_take_the_place_of_another() -> None:
    """Only choices of groups are counted, whatever the LoRA rank of the first step is."""
    known = GraphFootprints(ALL)
    for choice in (frozenset({QKV, O}), frozenset({QKV})):
        for rank in (32, 64, 16):
            assert known.serving(LoraFootprint(rank, choice)) == LoraFootprint(rank, choice)
    assert known.serving(LoraFootprint(64, frozenset({DOWN}))) == LoraFootprint(64, ALL)


def test_adapters_of_some_groups_are_expected_beside_one_of_all() -> None:
    known = GraphFootprints(ALL)
    known.add_rank(16)
    known.add_adapter(16, ALL, scaled=False, experts=False)
    known.add_adapter(64, frozenset({QKV, O}), scaled=False, experts=False)
    assert {LoraFootprint(64, ALL), LoraFootprint(64, frozenset({QKV, O}))} <= set(known)


@given(st.lists(st.tuples(st.sampled_from([8, 20, 64]), st.frozensets(st.integers(0, 3), min_size=1)), min_size=1))
def test_steps_of_expected_adapters_are_covered(expected: list[tuple[int, frozenset[int]]]) -> None:
    """Alone or mixed; without terms at groups that no adapter changes."""
    known = GraphFootprints(ALL)
    known.add_rank(16)
    for rank, groups in expected:
        known.add_adapter(rank, groups, scaled=False, experts=False)
    before, every = set(known), frozenset[int]().union(*(groups for _, groups in expected))
    for rank, groups in (*expected, (max(expected)[0], every)):
        found = known.serving(LoraFootprint(rank, groups))
        assert found is not None and any(one.covers(found) for one in before)
    choices = {one.groups for one in known if one.max_rank} - {ALL}
    assert len(choices) <= 2
    assert choices <= {every} or len({groups for _, groups in expected}) > 1


@pytest.mark.slow
def test_few_footprints_that_leave_groups_out_get_graphs(fused: FusedBase) -> None:
    gen, executor = generator(fused, ["qv", "o", "mlp"])
    for kind in ("qv", "o", "mlp"):
        collect(gen, asks(kind))
    assert {footprint for _, footprint in executor.decode_graphs} == {
        NO_ADAPTERS,
        LoraFootprint(16, frozenset({QKV})),
        LoraFootprint(16, frozenset({QKV, O})),
        LoraFootprint(16, ALL),
    }


def test_a_footprint_is_that_of_the_step(fused: FusedBase) -> None:
    slots = AdapterSlots(fused.groups, 3, fused.base.device)
    held = [part(fused, "qv", 3), part(fused, "o", 17)]
    qv, o = slots.place(named(held))
    assert slots.footprint(Segments((0, 1), (qv,))) == LoraFootprint(16, frozenset({QKV}))
    assert slots.footprint(Segments((0, 1, 2, 3), (qv, -1, o))) == LoraFootprint(32, frozenset({QKV, O}))
    slots.free(AdapterRef("a1", 1))
    assert slots.groups[o] == frozenset(), "an empty slot changes something"


footprints = st.builds(LoraFootprint, st.sampled_from([16, 32, 64]), st.frozensets(st.integers(0, 3)))


@given(st.sets(st.tuples(st.integers(1, 2), footprints | st.just(NO_ADAPTERS))), footprints)
def test_the_least_graph_that_covers_a_step_serves_it(
    keys: set[tuple[int, LoraFootprint]], footprint: LoraFootprint
) -> None:
    graphs = {key: key for key in keys}
    found = covering_graph(graphs, 1, footprint)
    covering = [
        own for size, own in keys if size == 1 and own.max_rank >= footprint.max_rank and own.groups >= footprint.groups
    ]
    if (1, footprint) in keys:
        assert found == (1, footprint)
    elif covering:
        assert found is not None
        size, chosen = found
        assert size == 1
        assert chosen in covering
        assert all((own.max_rank, len(own.groups)) >= (chosen.max_rank, len(chosen.groups)) for own in covering)
    else:
        assert found is None
    assert covering_graph(graphs, 1, NO_ADAPTERS) == graphs.get((1, NO_ADAPTERS)), "an adapter's graph serves none"
