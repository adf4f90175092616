"""Sites of one input in training, under Triton's interpreter: as torch's own products with the reference's terms."""

from __future__ import annotations

import pytest
import torch

from coserve.kernels.lora import reference
from coserve.kernels.lora.segmented.backend import SegmentedBackend
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import FrozenWeight, LoraPair
from tests.support.lora_grids import prepared, relative_error
from tests.support.lora_sites import DEVICE, D, Sites, drawn, leaves, make_sites

SEGMENTS = Segments((0, 33, 33, 38, 60), (1, 2, 0, -1))


def linear_group(x: torch.Tensor, stacked: FrozenWeight, segments: Segments, sites: Sites) -> tuple[torch.Tensor, ...]:
    lora, group = prepared(SegmentedBackend(), segments, sites)
    return lora.linear_group(group, x, stacked)


def lowered(sites: Sites) -> Sites:
    """In bfloat16, learning."""

    def pair(p: LoraPair | None) -> LoraPair | None:
        if p is None:
            return None
        a, b = (tensor.detach().bfloat16().requires_grad_() for tensor in (p.a_RD, p.b_OR))
        return LoraPair(a, b, p.scaling)

    return [tuple(pair(p) for p in own) for own in sites]


@pytest.mark.gpu
def test_on_a_gpu_in_bfloat16() -> None:
    sizes, x, weight = (96, 32, 40), drawn(60, D, seed=0).requires_grad_(), drawn(168, D, seed=1) * 0.1
    sites = make_sites(sizes, [(8, 17, 3), (16, 0, 1), (5, 9, 130)])
    low, low_x = lowered(sites), x.detach().bfloat16().requires_grad_()
    products = torch.split(x @ weight.T, list(sizes), 1)
    exact = [reference.lora_add(y, x, SEGMENTS, own) for y, own in zip(products, sites, strict=True)]
    got = linear_group(low_x, FrozenWeight(weight.bfloat16(), None, sizes), SEGMENTS, low)
    dys = [drawn(60, width, seed=50 + width) for width in sizes]
    wanted = torch.autograd.grad(exact, (x, *leaves(sites)), dys, materialize_grads=True)
    found = torch.autograd.grad(got, (low_x, *leaves(low)), [dy.bfloat16() for dy in dys], materialize_grads=True)
    for mine, other in (*zip(got, exact, strict=True), *zip(found, wanted, strict=True)):
        assert relative_error(mine, other) <= 2e-2


@pytest.mark.parametrize(
    ("sizes", "ranks", "biased", "inputs_learn"),
    [
        ((96, 32, 40), [(8, 17, 3), (16, 4, 1), (5, 9, 130)], False, True),
        ((96, 32, 40), [(8, 0, 3), (0, 0, 0), (0, 9, 0)], True, False),
        ((64, 88), [(0, 0, 7), (0, 0, 2)], False, False),
        ((64, 88), [(0, 0, 7), (0, 0, 2)], True, True),
        ((48,), [(8, 16, 4)], True, True),
    ],
    ids=["three", "some left out", "of one that is absent", "nobody but the input learns", "one"],
)
def test_outputs_and_gradients(
    sizes: tuple[int, ...], ranks: list[tuple[int, ...]], biased: bool, inputs_learn: bool
) -> None:
    x, weight = drawn(60, D, seed=0).requires_grad_(inputs_learn), drawn(sum(sizes), D, seed=1)
    bias = drawn(sum(sizes), seed=2) if biased else None
    sites = make_sites(sizes, ranks)
    products = torch.split(torch.nn.functional.linear(x, weight, bias), list(sizes), 1)
    expected = [reference.lora_add(y, x, SEGMENTS, own) for y, own in zip(products, sites, strict=True)]
    got = linear_group(x, FrozenWeight(weight, bias, sizes), SEGMENTS, sites)
    wanted = [tensor for tensor in (x, *leaves(sites)) if tensor.requires_grad]
    both = []
    for outs in (got, expected):
        loss = sum(((1 + i) * out.square().sum() for i, out in enumerate(outs)), torch.zeros((), device=DEVICE))
        if loss.requires_grad:
            both.append(torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True))
        else:  # nobody learns
            both.append(tuple(torch.zeros_like(tensor) for tensor in wanted))
    for mine, other in (*zip(got, expected, strict=True), *zip(*both, strict=True)):
        assert relative_error(mine, other) <= 1e-5


def test_no_tokens() -> None:
    sites = make_sites((48, 16), [(8, 16, 4), (1, 2, 3)])
    got = linear_group(
        drawn(0, D, seed=0), FrozenWeight(drawn(64, D, seed=1), None, (48, 16)), Segments((0,), ()), sites
    )
    assert [out.shape for out in got] == [(0, 48), (0, 16)]
