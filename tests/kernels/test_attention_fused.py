"""The fused attention kernels against a slow reference: in Triton's interpreter without a GPU, else also in
bfloat16."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coserve.kernels.attention.interface import E4M3_MAX, TokenRun, Window, as_cached
from coserve.kernels.attention.triton_paged.decode_steps import FusedStaticAttention
from coserve.kernels.attention.triton_paged.plan import decode_items, items_for, prefill_tiles
from coserve.kernels.attention.triton_paged.step import FusedPagedAttention
from coserve.kernels.gpu.device import H200
from tests.support.attention_cases import CHUNKS, DECODES, DEVICE, FAR, KINDS, TOLERANCE, Case, Kind, on_gpu, worst
from tests.support.examples import by_day, examples

PROCESSORS = H200.multiprocessors

RUNS = {"decodes": DECODES, "chunks": CHUNKS, "far": FAR}
STEPS = {f"{kind}-{runs}": (KINDS[kind], RUNS[runs]) for kind in KINDS for runs in RUNS}
QUICK = {
    step: (*STEPS[step], torch.float32)
    for step in ("all-decodes", "all-chunks", "all-far", "wide_values-chunks", "latents-decodes")
}
QUICK["latents-chunks"] = (KINDS["latents"], [*CHUNKS[:4], (60, 9)], torch.float32)  # 66 heads take their time
SLOW = {
    f"{kind}-{runs}-{dtype}": (KINDS[kind], RUNS[runs], dtype)
    for kind, runs, dtype in (
        ("one_for_all", "decodes", torch.float32),
        ("group_of_3", "chunks", torch.float32),
        ("wide", "far", torch.float16),
        ("latents", "far", torch.float16),
        ("latents_of_deepseek", "chunks", torch.float16),
        ("latents_and_all", "decodes", torch.float32),
        ("latents_and_all", "chunks", torch.float32),
        ("window", "chunks", torch.float16),
        ("pages_apart_unaligned", "far", torch.float32),
    )
}
"""Each kind and each run of a step on a GPU; with Triton's interpreter, which is slow, what differs most."""


def attend(attention: FusedPagedAttention | FusedStaticAttention, case: Case, *qkv: Tensor) -> Tensor:
    return attention.attend(0, *(qkv or (case.q_HTD, case.k_KTD, case.v_KTD)), case.kind.params(case.device))


@pytest.mark.parametrize("step", [*by_day(QUICK | SLOW, *QUICK), *on_gpu(STEPS)])
def test_a_step(step: tuple[Kind, list[tuple[int, int]], torch.dtype]) -> None:
    *_, dtype = step
    case = Case(*step, DEVICE)
    assert worst(attend(FusedPagedAttention(case.pages, case.runs), case), case.expected()) < TOLERANCE[dtype]
    case.check_written()


FP8 = {
    f"{kind}-{runs}": (KINDS[kind], RUNS[runs], torch.float32)
    for kind in ("group_of_4", "latents_and_all")
    for runs in ("decodes", "chunks")
}


@pytest.mark.parametrize("step", [*FP8.values(), *on_gpu(STEPS)])
def test_a_step_over_a_cache_in_fp8(step: tuple[Kind, list[tuple[int, int]], torch.dtype]) -> None:
    *_, dtype = step
    case = Case(*step, DEVICE, cache=torch.float8_e4m3fn)
    assert worst(attend(FusedPagedAttention(case.pages, case.runs), case), case.expected()) < TOLERANCE[dtype]
    case.check_written()


@pytest.mark.parametrize("runs", ["decodes", pytest.param("chunks", marks=pytest.mark.gpu)])
def test_what_exceeds_fp8_is_stored_as_its_largest_number(runs: str) -> None:
    case = Case(KINDS["group_of_4"], RUNS[runs], torch.float32, DEVICE, cache=torch.float8_e4m3fn)
    case.k_KTD.mul_(1e4)
    attend(FusedPagedAttention(case.pages, case.runs), case)
    assert case.pages.keys[0].float().nan_to_num().abs().max() == E4M3_MAX


@pytest.mark.gpu
@pytest.mark.parametrize("runs", RUNS)
def test_keys_and_values_are_rounded_to_fp8_as_torch_rounds(runs: str) -> None:
    """Triton's interpreter rounds otherwise. The newest ones count as they are stored, too."""
    cases = [Case(KINDS["group_of_4"], RUNS[runs], torch.bfloat16, DEVICE, cache=torch.float8_e4m3fn) for _ in range(2)]
    fine = [torch.randn_like(x) for x in (cases[0].k_KTD, cases[0].v_KTD)]
    rounded = [as_cached(x, torch.float8_e4m3fn).to(x.dtype) for x in fine]
    outputs = [
        attend(FusedPagedAttention(case.pages, case.runs), case, case.q_HTD, *new)
        for case, new in zip(cases, (fine, rounded), strict=True)
    ]
    assert torch.equal(*outputs)


BUFFERS = {"all": (KINDS["all"], torch.float32), "pages_apart": (KINDS["pages_apart"], torch.float16)}
BUFFERS["latents"] = (KINDS["latents"], torch.float32)


@pytest.mark.parametrize("buffers", [*by_day(BUFFERS, "all"), *on_gpu({name: (kind,) for name, kind in KINDS.items()})])
def test_fixed_buffers_serve_other_sequences(buffers: tuple[Kind, torch.dtype]) -> None:
    """Batches of other sizes and lengths through one object, padding included."""
    kind, dtype = buffers
    first = Case(kind, DECODES, dtype, DEVICE)
    pages = Case(kind, DECODES, dtype, DEVICE).pages
    attention = FusedStaticAttention(pages, batch=8, max_tokens=200)
    for runs in (DECODES, [(70, 1)], [], [(0, 1), (199, 1)], DECODES[::-1]):
        case = Case(kind, runs, dtype, DEVICE) if runs else first
        case.put_into(pages)
        attention.load(case.runs if runs else [])
        qkv = (case.q_HTD, case.k_KTD, case.v_KTD)
        padded = [torch.zeros(x.shape[0], 8, x.shape[2], dtype=dtype, device=DEVICE) for x in qkv]
        for to, x in zip(padded, qkv, strict=True):
            to[:, : len(runs)] = x[:, : len(runs)]
        got = attend(attention, case, *padded)
        assert torch.equal(got[len(runs) :], torch.zeros_like(got[len(runs) :]))
        assert attention.positions.tolist() == [position for position, _ in runs] + [0] * (8 - len(runs))
        if runs:
            assert worst(got[: len(runs)], case.expected()) < TOLERANCE[dtype]
            case.check_written(pages)


def test_a_sequence_that_grows_and_one_that_takes_its_row() -> None:
    """The page table follows: new pages of a sequence, other sequences in its row."""
    kind = Kind(2, 1, 16, page_tokens=4)
    whole = Case(kind, [(0, 6), (0, 5)], torch.float32, DEVICE)
    attention = FusedStaticAttention(whole.pages, batch=1, max_tokens=8)
    expected = whole.expected().split([6, 5])
    for sequence, steps in ((0, range(6)), (1, range(5)), (0, range(6))):
        run, row = whole.runs[sequence], 6 * sequence
        for t in steps:
            attention.load([TokenRun(1, t, run.pages[: t // 4 + 1])])
            got = attend(
                attention, whole, *(x[:, row + t : row + t + 1] for x in (whole.q_HTD, whole.k_KTD, whole.v_KTD))
            )
            assert worst(got[0], expected[sequence][t]) < 1e-5
    whole.check_written()


@settings(max_examples=examples(200))
@given(
    contexts=st.lists(st.integers(0, 40000), min_size=1, max_size=40),
    window=st.none() | st.builds(Window, st.integers(1, 5000), st.booleans()),
    kv_heads=st.sampled_from([1, 2, 8, 32, 600]),
)
def test_items_cover_each_key_once(contexts: list[int], window: Window | None, kv_heads: int) -> None:
    most = items_for(len(contexts), kv_heads, PROCESSORS)
    rows = np.arange(len(contexts))
    items = decode_items(np.array(contexts), rows, window, most, kv_heads, PROCESSORS)
    assert len(items) <= most
    for row, context in enumerate(contexts):
        mine = np.flatnonzero(items[:, 0] == row)
        begin = 0 if window is None else window.first(max(0, context - 1))
        assert items[mine[0], 2] == begin
        assert items[mine[-1], 3] == context
        assert (items[mine[1:], 2] == items[mine[:-1], 3]).all()
        assert (items[mine, 4] == mine[0]).all()
        assert (items[mine, 5] == (len(mine) if context else 0)).all()
        assert items[mine, 6].tolist() == [0] * (len(mine) - 1) + [1]
        if context:
            assert (items[mine, 3] > items[mine, 2]).all()


@settings(max_examples=examples(200))
@given(
    spans=st.lists(st.tuples(st.integers(0, 40000), st.integers(1, 300)), min_size=1, max_size=12),
    window=st.none() | st.builds(Window, st.integers(1, 5000), st.booleans()),
    kv_heads=st.sampled_from([1, 2, 8, 32, 600]),
    tokens=st.sampled_from([1, 16, 64]),
)
def test_tiles_cover_each_token_and_key_once(
    spans: list[tuple[int, int]], window: Window | None, kv_heads: int, tokens: int
) -> None:
    runs, row = [], 0
    for column, (position, new) in enumerate(spans):
        runs.append((column, row, TokenRun(new, position, ())))
        row += new
    items = prefill_tiles(runs, tokens, window, kv_heads, PROCESSORS)
    firsts = np.unique(items[:, 6])
    if len(items) > len(firsts):
        assert len(items) <= PROCESSORS // kv_heads
    covered: list[int] = []
    for first in firsts:
        tile = items[items[:, 6] == first]
        column, at, new, position = tile[0, :4].tolist()
        assert (tile[:, :4] == tile[0, :4]).all()
        assert np.flatnonzero(items[:, 6] == first).tolist() == list(range(first, first + tile[0, 7]))
        assert at - runs[column][1] == position - spans[column][0]
        assert tile[0, 4] <= (0 if window is None else window.first(position))
        assert tile[-1, 5] == position + new
        assert (tile[1:, 4] == tile[:-1, 5]).all()
        assert (tile[:, 4] % 128 == 0).all()
        assert (tile[:, 5] > tile[:, 4]).all()
        covered += range(at, at + new)
    assert sorted(covered) == list(range(row))


@pytest.mark.gpu
@pytest.mark.parametrize("runs", [DECODES, CHUNKS], ids=["decodes", "chunks"])
def test_pages_far_apart(runs: list[tuple[int, int]]) -> None:
    """Elements beyond what 32 bits count."""
    case = Case(Kind(4, 2, 64, apart=(1 << 27) - 2048), runs, torch.bfloat16, "cuda")
    assert case.pages.keys[0].stride(0) * len(case.pages.keys[0]) > 1 << 31
    assert worst(attend(FusedPagedAttention(case.pages, case.runs), case), case.expected()) < 2e-2
    case.check_written()


@pytest.mark.gpu
def test_a_captured_graph_serves_other_sequences() -> None:
    kind = Kind(32, 8, 128)
    pages = Case(kind, [(4000, 1)], torch.bfloat16, "cuda").pages
    attention = FusedStaticAttention(pages, batch=8, max_tokens=4096)
    q = torch.zeros(32, 8, 128, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.zeros(8, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    cases = [
        Case(kind, runs, torch.bfloat16, "cuda", seed)
        for seed, runs in enumerate(([(0, 1)] * 8, [(2500, 1), (3, 1), (63, 1)]))
    ]
    attention.load([])
    params = kind.params(torch.device("cuda"))
    attention.attend(0, q, k, v, params)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.attend(0, q, k, v, params)
    for case in (*cases, *cases):
        case.put_into(pages)
        for to, x in zip((q, k, v), (case.q_HTD, case.k_KTD, case.v_KTD), strict=True):
            to[:, : len(case.runs)] = x
        attention.load(case.runs)
        graph.replay()
        assert worst(out[: len(case.runs)], case.expected()) < 2e-2
        assert torch.equal(out[len(case.runs) :], torch.zeros_like(out[len(case.runs) :]))
