"""Awkward multi-LoRA batches, and the comparison with the fp32 reference, forward and gradients."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coserve.kernels.lora import reference
from coserve.kernels.lora.interface import LoraBackend, PreparedLora
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair, SiteGroup
from tests.support.examples import by_day

Add = Callable[[Tensor, Tensor, Segments, Sequence[LoraPair | None]], Tensor]


def prepared(
    backend: LoraBackend, segments: Segments, sites: Sequence[Sequence[LoraPair | None]]
) -> tuple[PreparedLora, SiteGroup]:
    """The terms of sites that read one input, `sites[site][adapter]`, and their group."""
    group = SiteGroup(tuple(str(site) for site in range(len(sites))))
    adapters = [
        {name: pair for name, pair in zip(group.names, own, strict=True) if pair is not None}
        for own in zip(*sites, strict=True)
    ]
    return backend.prepare(segments, adapters, [group]), group


def add_group(
    backend: LoraBackend,
    ys: Sequence[Tensor],
    x: Tensor,
    segments: Segments,
    sites: Sequence[Sequence[LoraPair | None]],
) -> list[Tensor]:
    """`PreparedLora.add` of one step at sites that read one input."""
    lora, group = prepared(backend, segments, sites)
    return lora.add(group, ys, x)


def adding(backend: LoraBackend) -> Add:
    """`add_group` at one site."""
    return lambda y, x, segments, pairs: add_group(backend, [y], x, segments, [pairs])[0]


@dataclass(frozen=True)
class Grid:
    """One batch: segment lengths, whose they are, each adapter's rank (0: it does not target the site), the site."""

    name: str
    lengths: tuple[int, ...]
    adapters: tuple[int, ...]
    ranks: tuple[int, ...]
    inputs: int = 80
    outputs: int = 72
    a_blocks: tuple[int, ...] = ()
    """Each adapter's blocks of A, which divide its rank and `inputs`; all 1 where left out."""
    b_blocks: tuple[int, ...] = ()

    @property
    def segments(self) -> Segments:
        bounds = [0]
        for length in self.lengths:
            bounds.append(bounds[-1] + length)
        return Segments(tuple(bounds), self.adapters)


def popularity(name: str, tokens: int, adapters: int, seed: int = 0) -> tuple[int, ...]:
    """The adapter of each of `tokens` one-token segments, adapters' tokens together, by Punica's names (§7)."""
    draw = random.Random(seed)
    match name:
        case "identical":
            owners = [0] * tokens
        case "distinct":
            owners = [index % adapters for index in range(tokens)]
        case "uniform":
            owners = [draw.randrange(adapters) for _ in range(tokens)]
        case _:  # skewed: Zipf-1.5, each adapter 1.5 times as popular as the next
            owners = draw.choices(range(adapters), [1.5**-index for index in range(adapters)], k=tokens)
    return tuple(sorted(owners))


GRIDS = (
    Grid("one_token", (1,), (0,), (16,)),
    Grid("one_adapter", (37,), (0,), (16,)),
    Grid("no_adapter", (5, 3), (-1, -1), ()),
    Grid("untargeted_site", (5, 3), (0, 1), (0, 8)),
    Grid("empty_segments", (0, 4, 0, 0, 3, 0), (0, 1, 2, 1, -1, 0), (4, 8, 16)),
    Grid("adapter_comes_back", (3, 2, 4, 1, 2), (0, 1, 0, -1, 0), (8, 4)),
    Grid("neighbours_of_one_adapter", (1, 1, 1, 2, 1), (1, 1, 1, 0, 0), (8, 4)),
    Grid("all_distinct", (1,) * 9, tuple(range(9)), (8,) * 9),
    Grid("mixed_ranks", (2, 1, 17, 1, 3, 1, 1, 2), (0, 1, 2, 3, 4, 5, 6, 7), (1, 4, 8, 16, 24, 64, 128, 256)),
    Grid("zipf", (1,) * 24, popularity("zipf", 24, 8), (1, 4, 8, 16, 24, 8, 4, 1)),
    Grid("skewed", (33, 1, 1, 2), (0, 1, 2, 3), (16, 8, 3, 5)),
    Grid("odd_sizes", (19, 70), (0, 1), (5, 17), inputs=67, outputs=45),
    Grid("wide", (3, 5, 2), (0, 1, -1), (8, 20), inputs=1100, outputs=1096),
    Grid("zero_tokens", (0,), (0,), (8,)),
    Grid("no_segments", (), (), ()),
)

BD_GRIDS = (
    Grid("bd_a", (5, 1, 3, 2), (0, 1, 2, -1), (32, 16, 24), 96, 72, a_blocks=(2, 1, 4)),
    Grid("bd_b", (5, 1, 3, 2), (0, 1, 2, -1), (32, 16, 24), 72, 96, b_blocks=(2, 1, 4)),
    Grid("bd_odd_a", (3, 20, 1, 2), (0, 1, 2, 3), (4, 15, 6, 17), 60, 40, a_blocks=(4, 3, 2, 1)),
    Grid("bd_odd_b", (3, 20, 1, 2), (0, 1, 2, 3), (4, 15, 6, 17), 40, 60, b_blocks=(4, 3, 2, 1)),
    Grid("bd_of_single_ranks", (2, 9), (0, 1), (3, 6), 36, 42, a_blocks=(3, 1), b_blocks=(1, 6)),
    Grid("bd_both_kinds", (2, 1, 70, 3), (0, 1, 2, 0), (8, 5, 40), 80, 72, a_blocks=(2, 1, 1), b_blocks=(1, 1, 4)),
    Grid("bd_wide", (3, 17), (0, 1), (96, 128), 2176, 1088, a_blocks=(1, 8), b_blocks=(4, 1)),
)
"""Block-diagonal pairs beside plain ones: blocks of whole tiles and of parts of them, of odd sizes, of one rank."""


AWKWARD = ("empty_segments", "zero_tokens", "no_segments", "untargeted_site", "odd_sizes", "bd_of_single_ranks")
SLOW = ("skewed", "adapter_comes_back", "bd_odd_a", "bd_both_kinds")


def interpreted() -> list[Any]:
    """Of `GRIDS` and `BD_GRIDS` for `parametrize` what a kernel gets wrong first; with bfloat16 a GPU runs all."""
    named = {grid.name: grid for grid in (*GRIDS, *BD_GRIDS)}
    return by_day({name: named[name] for name in (*AWKWARD, *SLOW)}, *AWKWARD)


@dataclass(frozen=True)
class Case:
    y: Tensor
    x: Tensor
    segments: Segments
    pairs: tuple[LoraPair | None, ...]

    def leaves(self) -> tuple[Tensor, ...]:
        return (self.y, self.x, *(t for pair in self.pairs if pair is not None for t in (pair.a_RD, pair.b_OR)))


def make_case(grid: Grid, dtype: torch.dtype, device: str = "cpu", *, seed: int = 0, grad: bool = False) -> Case:
    """Random inputs near unit scale, so that every term weighs in the comparison."""
    draw = torch.Generator().manual_seed(seed)

    def tensor(rows: int, columns: int, scale: float) -> Tensor:
        return (torch.randn(rows, columns, generator=draw) * scale).to(device, dtype).requires_grad_(grad)

    def pair(index: int, rank: int) -> LoraPair:
        a_blocks, b_blocks = (own[index] if own else 1 for own in (grid.a_blocks, grid.b_blocks))
        inputs, ranks = grid.inputs // a_blocks, rank // b_blocks
        a_RD, b_OR = tensor(rank, inputs, inputs**-0.5), tensor(grid.outputs, ranks, ranks**-0.5)
        return LoraPair(a_RD, b_OR, 0.5 + index, a_blocks=a_blocks, b_blocks=b_blocks)

    segments = grid.segments
    y = tensor(segments.tokens, grid.outputs, 1.0)
    x = tensor(segments.tokens, grid.inputs, 1.0)
    pairs = tuple(pair(index, rank) if rank else None for index, rank in enumerate(grid.ranks))
    return Case(y, x, segments, pairs)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """‖got - expected‖ / ‖expected‖ in fp32; NaN or Inf anywhere counts as infinite."""
    if not torch.isfinite(got).all():
        return float("inf")
    norm = expected.float().norm().item()
    return (got.float() - expected.float()).norm().item() / max(norm, 1e-12) if got.numel() else 0.0


TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def check_forward(add: Add, grid: Grid, dtype: torch.dtype, device: str = "cpu") -> None:
    """`add` without gradients (it may write into y) against the reference."""
    case = make_case(grid, dtype, device)
    expected = reference.lora_add(case.y, case.x, case.segments, case.pairs)
    with torch.no_grad():
        got = add(case.y.clone(), case.x, case.segments, case.pairs)
    assert got.dtype == case.y.dtype
    assert got.shape == case.y.shape
    assert relative_error(got, expected) <= TOLERANCE[dtype], grid.name


def check_gradients(add: Add, grid: Grid, dtype: torch.dtype, device: str = "cpu") -> None:
    """Gradients to y, x and every A and B against autograd through the fp32 reference."""
    case = make_case(grid, dtype, device, grad=True)
    exact = make_case(grid, torch.float32, device, grad=True)
    weight = torch.randn(case.y.shape, generator=torch.Generator().manual_seed(1)).to(device)
    for leaf, own in zip(exact.leaves(), case.leaves(), strict=True):
        leaf.data.copy_(own.detach())
    expected = torch.autograd.grad(
        (reference.lora_add(exact.y, exact.x, exact.segments, exact.pairs) * weight).sum(),
        exact.leaves(),
        allow_unused=True,
        materialize_grads=True,
    )
    got = torch.autograd.grad(
        (add(case.y, case.x, case.segments, case.pairs) * weight.to(dtype)).sum(),
        case.leaves(),
        allow_unused=True,
        materialize_grads=True,
    )
    for mine, wanted in zip(got, expected, strict=True):
        if wanted.norm() == 0:
            assert mine.float().norm() == 0, grid.name
        else:
            assert relative_error(mine, wanted) <= 2 * TOLERANCE[dtype], grid.name


def check_group(backend: LoraBackend, grids: Sequence[Grid], device: str) -> None:
    """Compare sites of one input with the reference, in fp32: new outputs, outputs in place, gradients."""
    cases = [make_case(grid, torch.float32, device, seed=at, grad=True) for at, grid in enumerate(grids)]
    x, segments, pairs = cases[0].x, cases[0].segments, [case.pairs for case in cases]
    leaves = [x, *(leaf for case in cases for leaf in case.leaves() if leaf is not x)]
    expected = [reference.lora_add(case.y, x, segments, case.pairs) for case in cases]
    got = add_group(backend, [case.y for case in cases], x, segments, pairs)
    gradients = [
        torch.autograd.grad(torch.stack([out.square().sum() for out in outs]).sum(), leaves, materialize_grads=True)
        for outs in (got, expected)
    ]
    with torch.no_grad():
        in_place = add_group(backend, [case.y.clone() for case in cases], x, segments, pairs)
    for mine, wanted in (*zip(got, expected, strict=True), *zip(in_place, expected, strict=True)):
        assert relative_error(mine, wanted) <= 1e-5
    for mine, wanted in zip(*gradients, strict=True):
        assert relative_error(mine, wanted) <= 5e-5
