"""Under Triton's interpreter without a GPU; the bfloat16 grid of a GPU is in `test_kernels_gpu`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coserve.kernels.lora import reference
from coserve.kernels.lora.segmented import block_sizes, launch_decode, launch_prefill, plan
from coserve.kernels.lora.segmented.adapter_table import SiteTable
from coserve.kernels.lora.segmented.backend import SegmentedBackend
from coserve.kernels.lora.segmented.block_sizes import PrefillBlocks
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair, SiteGroup
from tests.support.lora_grids import (
    GRIDS,
    Grid,
    add_group,
    adding,
    check_forward,
    check_gradients,
    check_group,
    interpreted,
    make_case,
    prepared,
    relative_error,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKEND = SegmentedBackend()
lora_add = adding(BACKEND)
grids = pytest.mark.parametrize("grid", interpreted())


@grids
def test_decode_forward(grid: Grid) -> None:
    check_forward(lora_add, grid, torch.float32, DEVICE)


def test_forward_in_float16() -> None:
    check_forward(lora_add, Grid("odd", (1, 9), (0, 1), (5, 17), inputs=67, outputs=45), torch.float16, DEVICE)


SHORTEST = block_sizes.PREFILL_BLOCKS.split_length
LONG_INPUTS = Grid("2500 inputs", (3, 0, 5, 1), (0, 1, 2, -1), (16, 40, 8), 2500, 64)


def adding_overlapped(y: Tensor, x: Tensor, segments: Segments, pairs: Sequence[LoraPair | None]) -> Tensor:
    """As behind a GEMM on the same input."""
    lora, group = prepared(BACKEND, segments, [pairs])
    lora.add_(group, [y], x, overlapped=True)
    return y


@pytest.mark.slow
@grids
def test_decode_forward_overlapped(grid: Grid) -> None:
    check_forward(adding_overlapped, grid, torch.float32, DEVICE)


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
def test_decode_forward_of_many_inputs(steps: int, overlapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's inputs in one step of k or several, the last of them partly there."""
    blocks = block_sizes.decode_blocks(2500, (64,), 3, 4, 8, 48)
    monkeypatch.setattr(launch_decode, "decode_blocks", lambda *_: replace(blocks, steps=steps))
    check_forward(adding_overlapped if overlapped else lora_add, LONG_INPUTS, torch.float32, DEVICE)


@grids
def test_prefill_forward(grid: Grid) -> None:
    check_forward(adding(SegmentedBackend(plan.Cutting(decode_max_run=0))), grid, torch.float32, DEVICE)


def many_blocks(run: int = 4) -> SegmentedBackend:
    """Small batches are cut as large ones are: k among programs, up to `run` output blocks a program."""
    blocks = PrefillBlocks(k=32, o=32, run_blocks=run, split_length=16, expand_programs=1, wide_blocks=60)
    return SegmentedBackend(plan.Cutting(decode_max_run=0, prefill=blocks))


@grids
def test_prefill_forward_in_many_blocks(grid: Grid) -> None:
    check_forward(adding(many_blocks()), grid, torch.float32, DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "ranks"), [(1, (130, 20, 256, 1)), (4, (128, 40, 3, 16)), (64, (8, 17, 0, 100))], ids=str
)
def test_prefill_kernels_of_three_sites_at_every_width(
    run: int, ranks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = many_blocks(run) if run > 1 else BACKEND
    dims, expand = set(), launch_prefill.prefill_expand
    monkeypatch.setattr(launch_prefill, "prefill_expand", lambda *a, **k: (dims.add(a[2].dim()), expand(*a, **k)))
    lengths, adapters = (70, 0, 3, 65, 2), (0, 1, 2, 3, -1)
    sites = (ranks, ranks[::-1], (5, 9, 30, 64))
    grids = [Grid(f"site{at}", lengths, adapters, own, 72, 88 + 40 * at) for at, own in enumerate(sites)]
    check_group(backend, grids, DEVICE)
    assert dims == ({4} if run == 64 and max(ranks) <= block_sizes.LOOPED_MAX_RANK else {3}), "who sums the parts"


@given(st.integers(1, 5000), st.integers(0, 20000), st.sampled_from([16, 32, 64, 128]), st.integers(1, 300))
def test_splits_cover_a_sum_once_and_none_is_empty(programs: int, length: int, block: int, wanted: int) -> None:
    splits, steps = block_sizes.splits_of(programs, max(1, length), block, wanted, SHORTEST)
    assert splits * steps * block >= length > (splits - 1) * steps * block or length == 0
    assert splits == 1 or (programs * splits <= wanted and splits <= length // SHORTEST)


def test_who_serves_a_batch() -> None:
    def rows(*lengths: int) -> tuple[int, bool]:
        bounds = [sum(lengths[:at]) for at in range(len(lengths) + 1)]
        return plan.tile_rows(Segments(tuple(bounds), tuple(range(len(lengths)))))

    assert rows(1, 8, 2) == (8, True)
    assert rows(64, 1) == (16, True)
    assert rows(65) == (64, False)
    assert rows(*[33] * 20) == (64, False)
    assert rows(*[32] * 20) == (16, True)


@given(st.integers(1, 5000), st.integers(1, 1000), st.integers(1, 300))
def test_runs_leave_enough_programs(tiles: int, output_blocks: int, R: int) -> None:
    run = block_sizes.run_length(tiles, output_blocks, R, block_sizes.PREFILL_BLOCKS)
    assert run in (1, 2, 4, 8)
    assert run == 1 or (
        tiles * output_blocks // run >= block_sizes.PREFILL_BLOCKS.expand_programs and block_sizes.LOOPED_MAX_RANK >= R
    )


@grids
def test_gradients(grid: Grid) -> None:
    check_gradients(lora_add, grid, torch.float32, DEVICE)


def test_sites_of_one_input_together() -> None:
    ranks = ((16, 8, 20), (16, 0, 20), (8, 3, 1), (0, 5, 6))
    grids = [Grid(f"site{at}", (2, 1, 5), (0, 1, 2), own, 48, 40 + 8 * at) for at, own in enumerate(ranks)]
    cases = [make_case(grid, torch.float32, DEVICE, seed=at) for at, grid in enumerate(grids)]
    x, segments, pairs = cases[0].x, cases[0].segments, [case.pairs for case in cases]
    expected = [reference.lora_add(case.y, x, segments, case.pairs) for case in cases]
    got = add_group(BACKEND, [case.y.clone() for case in cases], x, segments, pairs)
    for mine, wanted in zip(got, expected, strict=True):
        assert relative_error(mine, wanted) <= 1e-5


def test_gradients_of_sites_of_one_input_together() -> None:
    ranks = ((16, 8), (4, 0), (5, 3))
    grids = [Grid(f"site{at}", (3, 2), (0, 1), own, 48, 40) for at, own in enumerate(ranks)]
    cases = [make_case(grid, torch.float32, DEVICE, seed=at, grad=True) for at, grid in enumerate(grids)]
    x, segments = cases[0].x, cases[0].segments
    leaves = [x, *(leaf for case in cases for leaf in case.leaves() if leaf is not case.x)]

    def gradients(outs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(sum((out * (at + 1)).sum() for at, out in enumerate(outs)), leaves)

    ys, pairs = [case.y for case in cases], [case.pairs for case in cases]
    expected = gradients([reference.lora_add(y, x, segments, own) for y, own in zip(ys, pairs, strict=True)])
    for mine, wanted in zip(gradients(add_group(BACKEND, ys, x, segments, pairs)), expected, strict=True):
        assert relative_error(mine, wanted) <= 2e-5


def test_strided_outputs_are_written_in_place() -> None:
    case = make_case(GRIDS[6], torch.float32, DEVICE)
    wide = torch.zeros(case.y.shape[0], 2 * case.y.shape[1], device=DEVICE)
    part = wide[:, case.y.shape[1] :]
    part.copy_(case.y)
    lora_add(part, case.x, case.segments, case.pairs)
    assert relative_error(part, reference.lora_add(case.y, case.x, case.segments, case.pairs)) <= 1e-5
    assert not wide[:, : case.y.shape[1]].any()


def test_tables_of_all_sites_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites of several widths, adapters that leave some out: each site finds its own columns, gradients included."""
    lengths, adapters = (33, 5, 0, 20), (2, 0, 1, -1)
    grids = [
        Grid(f"site{at}", lengths, adapters, ranks, 40 + 8 * at, 72)
        for at, ranks in enumerate([(8, 17, 3), (0, 0, 0), (0, 40, 16)])
    ]
    cases = [make_case(grid, torch.float32, DEVICE, seed=at, grad=True) for at, grid in enumerate(grids)]
    segments, built = cases[0].segments, list[int]()
    made = plan.site_table

    def counted(pairs: Sequence[Sequence[LoraPair | None]], device: torch.device) -> tuple[SiteTable, list[LoraPair]]:
        built.append(len(pairs))
        return made(pairs, device)

    monkeypatch.setattr(plan, "site_table", counted)
    groups = [SiteGroup((str(site),)) for site in range(3)]
    adapters = [
        {str(site): pair for site, case in enumerate(cases) if (pair := case.pairs[adapter]) is not None}
        for adapter in range(3)
    ]
    lora = BACKEND.prepare(segments, adapters, groups)
    for group, case in zip(groups, cases, strict=True):
        (mine,) = lora.add(group, [case.y], case.x)
        found = [mine, reference.lora_add(case.y, case.x, segments, case.pairs)]
        gradients = [torch.autograd.grad(out.square().sum(), case.leaves(), materialize_grads=True) for out in found]
        for mine, wanted in ((found[0], found[1]), *zip(*gradients, strict=True)):
            assert relative_error(mine, wanted) <= 1e-5
    assert built == [2], "one table, without the site that no adapter changes"


@given(
    inputs=st.integers(1, 60_000),
    outputs=st.lists(st.integers(1, 60_000), min_size=1, max_size=3).map(tuple),
    tiles=st.integers(1, 256),
    blocks=st.integers(1, 16),
    rows=st.sampled_from(plan.DECODE_ROWS),
    R=st.integers(1, 256),
)
def test_decode_sizes_fit_registers(
    inputs: int, outputs: tuple[int, ...], tiles: int, blocks: int, rows: int, R: int
) -> None:
    found = block_sizes.decode_blocks(inputs, outputs, tiles, tiles * blocks, rows, R)
    splits = block_sizes.decode_splits(inputs, found)
    assert (splits - 1) * found.k * found.steps < inputs <= splits * found.k * found.steps
    assert found.r in (16, 32, 64)
    assert found.r == 16 or found.r < 2 * R
    assert found.r * found.o <= 32 * 256
