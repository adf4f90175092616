"""Attention of steps of any mix in fixed buffers: Triton's interpreter without a GPU, else also captured and in
bfloat16."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coserve.kernels.attention.interface import MixedCapacity, Pages, TokenRun, Window
from coserve.kernels.attention.torch_paged.paged import GatheredMixedAttention
from coserve.kernels.attention.triton_paged.mixed_steps import FusedMixedAttention, placed, plan_layers
from tests.support.attention_cases import CHUNKS, DECODES, DEVICE, FAR, KINDS, TOLERANCE, Case, Kind, on_gpu, worst
from tests.support.examples import by_day, examples

CAPACITY = MixedCapacity(tokens=128, sequences=9, chunks=5, context=1700)
FARTHEST = [(0, 1), (1500, 2), (520, 3)]
STEPS = [CHUNKS, DECODES[::-1], FARTHEST, []]
"""Everything at once, decodes alone, keys that are cut, and nothing."""


def padded(case: Case, rows: int) -> list[Tensor]:
    """q, k and v with rows of padding, which nobody may look at."""
    found = []
    for x in (case.q_HTD, case.k_KTD, case.v_KTD):
        to = torch.full((x.shape[0], rows, x.shape[2]), float("nan"), dtype=x.dtype, device=x.device)
        to[:, : x.shape[1]] = x
        found.append(to)
    return found


def check(attention: FusedMixedAttention, pages: Pages, case: Case, runs: int, limit: float) -> None:
    got = attention.attend(0, *padded(case, attention.capacity.tokens), case.kind.params(case.device))
    real = sum(run.tokens for run in case.runs) if runs else 0
    assert torch.equal(got[real:], torch.zeros_like(got[real:]))
    if runs:
        assert worst(got[:real], case.expected()) < limit
        case.check_written(pages)


INTERPRETED = {name: (KINDS[name], torch.float32) for name in ("all", "group_of_3", "pages_apart_unaligned", "latents")}


@pytest.mark.parametrize(
    "case", [*by_day(INTERPRETED, "all"), *on_gpu({name: (kind,) for name, kind in KINDS.items()})]
)
@pytest.mark.slow
def test_one_form_serves_steps_of_any_mix(case: tuple[Kind, torch.dtype]) -> None:
    kind, dtype = case
    first = Case(kind, CHUNKS, dtype, DEVICE)
    pages = Case(kind, FARTHEST, dtype, DEVICE).pages
    attention = FusedMixedAttention(pages, CAPACITY)
    for runs in (*STEPS, FARTHEST):  # each step must leave the kernels' counters at 0 for those after it
        case = Case(kind, runs, dtype, DEVICE) if runs else first
        case.put_into(pages)
        attention.load(case.runs if runs else [])
        check(attention, pages, case, len(runs), TOLERANCE[dtype])


def test_plain_torch_serves_the_same() -> None:
    kind = Kind(8, 2, 32, window=40, sinks=True)
    first = Case(kind, CHUNKS, torch.float32, "cpu")
    pages = Case(kind, FARTHEST, torch.float32, "cpu").pages
    attention = GatheredMixedAttention(pages, CAPACITY)
    for runs in STEPS:
        case = Case(kind, runs, torch.float32, "cpu") if runs else first
        case.put_into(pages)
        for cache in (*pages.keys, *pages.values):  # which plain torch needs
            cache.nan_to_num_(0.0)
        attention.load(case.runs if runs else [])
        got = attention.attend(0, *padded(case, CAPACITY.tokens), kind.params(torch.device("cpu")))
        real = sum(run.tokens for run in case.runs) if runs else 0
        assert torch.equal(got[real:], torch.zeros_like(got[real:]))
        if runs:
            assert worst(got[:real], case.expected()) < 1e-5


def test_what_a_capacity_holds() -> None:
    capacity = MixedCapacity(tokens=20, sequences=4, chunks=2, context=30)

    def holds(*runs: tuple[int, int]) -> bool:
        return capacity.holds([TokenRun(tokens, position, ()) for position, tokens in runs])

    assert holds()
    assert holds((0, 18), (29, 1), (5, 1))
    assert not holds((0, 19), (29, 1), (5, 1))
    assert not holds(*[(3, 1)] * 5)
    assert not holds((0, 2), (0, 2), (0, 2))
    assert not holds((29, 2))


@settings(max_examples=examples(150))
@given(
    mix=st.lists(st.tuples(st.integers(0, 40000), st.integers(1, 300)), max_size=20),
    window=st.none() | st.builds(Window, st.integers(1, 5000), st.booleans()),
    heads=st.sampled_from([(8, 8), (32, 8), (16, 1), (64, 4), (600, 300)]),
)
def test_every_step_that_a_capacity_holds_has_a_plan(
    mix: list[tuple[int, int]], window: Window | None, heads: tuple[int, int]
) -> None:
    """Its items are those of the plain plan, as many as there is capacity for, and none of them uses another's
    counter."""
    capacity = MixedCapacity(tokens=512, sequences=12, chunks=8, context=40300)
    runs = [TokenRun(tokens, position, (0,)) for position, tokens in mix]
    while not capacity.holds(runs):
        runs.pop()
    plan = plan_layers(capacity, *heads, 128, window, torch.zeros(0, dtype=torch.bfloat16))
    plan.load(*placed(runs))
    items, tiles = plan.table[: plan.most_items], plan.table[plan.most_items :]
    items, tiles = items[items[:, 0] >= 0], tiles[tiles[:, 2] > 0]
    decodes = {i: run for i, run in enumerate(runs) if run.tokens == 1}
    assert set(items[:, 0].tolist()) == set(decodes)
    for column, run in decodes.items():
        mine = items[items[:, 0] == column]
        assert int(mine[:, 6].sum()) == 1
        assert int((mine[:, 3] - mine[:, 2]).sum()) == run.position + 1 - (window.first(run.position) if window else 0)
    assert set(tiles[:, 0].tolist()) == {i for i, run in enumerate(runs) if run.tokens > 1}
    whole = tiles[tiles[:, 6] == torch.arange(len(tiles))]
    assert int(whole[:, 2].sum()) == sum(run.tokens for run in runs if run.tokens > 1)
    wave = max(1, 132 // heads[1])
    assert not (tiles[:, 7] > 1).any() or len(tiles) <= wave, "parts are kept for one wave"


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 70])
def test_a_captured_form_serves_steps_of_any_mix(window: int | None) -> None:
    kind = Kind(32, 8, 128, window=window)
    capacity = MixedCapacity(tokens=192, sequences=16, chunks=6, context=4096)
    cases = [
        Case(kind, runs, torch.bfloat16, "cuda", seed)
        for seed, runs in enumerate((CHUNKS, DECODES, FAR, [(2500, 60), (3, 1), (0, 100)], [(4000, 1)]))
    ]
    q, k, v = (torch.zeros(heads, capacity.tokens, 128, dtype=torch.bfloat16, device="cuda") for heads in (32, 8, 8))
    pages = Case(kind, [(4500, 1)], torch.bfloat16, "cuda").pages
    attention = FusedMixedAttention(pages, capacity)
    attention.load([])
    params = kind.params(torch.device("cuda"))
    attention.attend(0, q, k, v, params)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.attend(0, q, k, v, params)
    for case in (*cases, *cases):
        case.put_into(pages)
        for to, x in zip((q, k, v), padded(case, capacity.tokens), strict=True):
            to.copy_(x)
        attention.load(case.runs)
        graph.replay()
        real = sum(run.tokens for run in case.runs)
        assert worst(out[:real], case.expected()) < 2e-2
        assert torch.equal(out[real:], torch.zeros_like(out[real:]))
