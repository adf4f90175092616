"""Gradients that the kernels add to sums in fp32: those that autograd would give, added to what was there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from coserve.kernels.lora import reference
from coserve.kernels.lora.interface import PreparedLora
from coserve.kernels.lora.segmented.backend import SegmentedBackend
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import FrozenWeight, LoraPair, MainGrads, SiteGroup
from tests.support.lora_grids import prepared, relative_error
from tests.support.lora_sites import Sites, drawn, leaves, make_sites

D = 72
SIZES = (96, 32, 40)
RANKS = {
    "few rows each": [(8, 17, 3, 4), (16, 0, 1, 4), (5, 9, 130, 4)],
    "so many that parts are summed": [(8, 17, 3, 4), (16, 0, 1, 4), (5, 9, 30, 4)],
    "one adapter": [(8, 17, 3, 4), (16, 0, 1, 4), (5, 9, 70, 4)],
    "in blocks": [(8, 16, 3, 4), (16, 0, 4, 4), (5, 24, 6, 4)],
    "in blocks, parts are summed": [(8, 64, 3, 4), (16, 0, 4, 4), (5, 24, 6, 4)],
}
MIXED = {(0, 0): (1, 2), (0, 1): (1, 4), (1, 0): (1, 4), (2, 1): (3, 1), (2, 2): (1, 2)}
"""Blocks of A and B of some pairs, whose ranks are those of blocks of whole vectors and of others."""
BLOCKS = {"in blocks": MIXED, "in blocks, parts are summed": MIXED}
BATCHES = {
    "few rows each": Segments((0, 33, 33, 38, 60), (1, 2, 0, -1)),
    "so many that parts are summed": Segments((0, 400, 470, 600), (0, 2, 1)),
    "one adapter": Segments((0, 300), (2,)),
    "in blocks": Segments((0, 33, 33, 38, 60), (1, 2, 0, -1)),
    "in blocks, parts are summed": Segments((0, 400, 470, 600), (1, 2, 0)),
}
"""Adapter 3 never has a row."""

Adds = Callable[[PreparedLora, SiteGroup, Tensor], Sequence[Tensor]]


def with_sums(sites: Sites, dtype: torch.dtype) -> Sites:
    """The same pairs with sums that hold something already."""

    def pair(p: LoraPair | None) -> LoraPair | None:
        if p is None:
            return None
        a, b = (tensor.detach().to(dtype).requires_grad_() for tensor in (p.a_RD, p.b_OR))
        return replace(p, a_RD=a, b_OR=b, main_grads=MainGrads(torch.ones_like(a).float(), torch.ones_like(b).float()))

    return [tuple(pair(p) for p in own) for own in sites]


def sums(sites: Sites) -> list[Tensor]:
    held = [pair.main_grads for own in sites for pair in own if pair is not None]
    return [tensor.detach() for own in held if own is not None for tensor in (own.a_RD, own.b_OR)]


def stacked(lora: PreparedLora, group: SiteGroup, x: Tensor) -> Sequence[Tensor]:
    weight = drawn(sum(SIZES), D, seed=1).to(x.dtype) * 0.1
    return lora.linear_group(group, x, FrozenWeight(weight, None, SIZES))


def alone(lora: PreparedLora, group: SiteGroup, x: Tensor) -> Sequence[Tensor]:
    weight = drawn(sum(SIZES), D, seed=1).to(x.dtype) * 0.1
    return lora.add(group, torch.split(x @ weight.T, list(SIZES), 1), x)


def by_reference(x: Tensor, segments: Segments, sites: Sites) -> Sequence[Tensor]:
    weight = drawn(sum(SIZES), D, seed=1) * 0.1
    ys = torch.split(x @ weight.T, list(SIZES), 1)
    return [reference.lora_add(y, x, segments, own) for y, own in zip(ys, sites, strict=True)]


def compare(run: Adds, name: str, dtype: torch.dtype, *, inputs_learn: bool, limit: float) -> None:
    segments, plain = BATCHES[name], make_sites(SIZES, RANKS[name], BLOCKS.get(name, {}))
    summed = with_sums(plain, dtype)
    x = drawn(segments.tokens, D, seed=0)
    mine = x.to(dtype).detach().requires_grad_(inputs_learn)
    expected = [torch.ones_like(tensor) for tensor in leaves(plain)]
    for micro_batch in range(2):
        dys = [drawn(segments.tokens, width, seed=50 + width + micro_batch) for width in SIZES]
        theirs = x.detach().requires_grad_()
        outs = by_reference(theirs, segments, plain)
        dx, *gradients = torch.autograd.grad(outs, (theirs, *leaves(plain)), dys, materialize_grads=True)
        for total, gradient in zip(expected, gradients, strict=True):
            total += gradient
        lora, group = prepared(SegmentedBackend(), segments, summed)
        got = run(lora, group, mine)
        reached = mine if inputs_learn else lora.anchor
        assert reached is not None
        (found,) = torch.autograd.grad(got, reached, [dy.to(dtype) for dy in dys], allow_unused=not inputs_learn)
        if inputs_learn:
            assert relative_error(found, dx) <= limit
        for own, other in zip(got, outs, strict=True):
            assert relative_error(own, other) <= limit
    for total, other in zip(sums(summed), expected, strict=True):
        assert relative_error(total, other) <= limit
    assert all(tensor.grad is None for tensor in leaves(summed))
    absent = {0, 1, 2, 3} - set(segments.adapters)
    for own in summed:
        for adapter in absent:
            pair = own[adapter]
            if pair is not None and pair.main_grads is not None:
                assert (pair.main_grads.a_RD == 1).all()
                assert (pair.main_grads.b_OR == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "run", "inputs_learn"),
    [
        ("few rows each", alone, True),
        ("in blocks", stacked, False),
        ("in blocks, parts are summed", stacked, True),
        ("one adapter", alone, False),
    ],
)
def test_sums(name: str, run: Adds, inputs_learn: bool) -> None:
    compare(run, name, torch.float32, inputs_learn=inputs_learn, limit=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("run", [stacked, alone])
@pytest.mark.parametrize("name", BATCHES)
def test_sums_on_a_gpu_in_bfloat16(run: Adds, name: str) -> None:
    compare(run, name, torch.bfloat16, inputs_learn=True, limit=2e-2)


def test_some_with_sums_and_some_without_are_refused() -> None:
    sites = make_sites(SIZES, RANKS["few rows each"])
    mixed = [(with_sums(sites, torch.float32)[0][0], *sites[0][1:]), *sites[1:]]
    with pytest.raises(AssertionError, match="or of none"):
        prepared(SegmentedBackend(), BATCHES["few rows each"], mixed)


def test_a_fixed_batch_holds_nothing_of_the_batches_that_it_took_once_it_forgets() -> None:
    name, batch = "few rows each", Segments((0, 20, 40, 50, 60), (0, 1, 2, 3))
    sites = with_sums(make_sites(SIZES, RANKS[name]), torch.float32)
    held = [
        weakref.ref(tensor) for own in sites for pair in own if pair is not None for tensor in (pair.a_RD, pair.b_OR)
    ]
    lora, group = prepared(SegmentedBackend(), batch, sites)
    fixed = lora.fixed()
    again, _ = prepared(SegmentedBackend(), batch, sites)
    fixed.take(again)
    fixed.forget()
    del lora, again, sites
    gc.collect()
    assert not any(reference() is not None for reference in held)
    other, own_group = prepared(SegmentedBackend(), batch, with_sums(make_sites(SIZES, RANKS[name]), torch.float32))
    fixed.take(other)
    x = drawn(batch.tokens, D, seed=0)
    weight = FrozenWeight(drawn(sum(SIZES), D, seed=1) * 0.1, None, SIZES)
    y, _ = fixed.linear_forward(group, x, weight, keep=False)
    plain, _ = other.linear_forward(own_group, x, weight, keep=False)
    assert torch.equal(y, plain), "it is for the batch that it took last"
