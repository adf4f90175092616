"""Kernels of quantised weights against plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coserve.kernels.gemm import gemv, skinny
from coserve.kernels.gpu.device import interpreted
from coserve.kernels.quantized import fp8, nf4
from coserve.kernels.quantized.weights import Fp8Weight, Nf4Weight
from coserve.model.gemm_choice import GemmChoice


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_rows_are_rounded_to_fp8() -> None:
    """Rows with a stride, of no power of two, and one of zeros."""
    x = draw(5, 112)[:, :96]
    x[3] = 0
    codes, scales = fp8.quantize_activations(x)
    expected, own = fp8.quantize(x)
    torch.testing.assert_close(scales, own)
    error = (codes.float() - expected.float()).norm() / expected.float().norm()
    assert error <= (0.05 if interpreted() else 0.0), (
        "expected the numbers of torch, but for the interpreter's rounding"
    )
    assert not codes[3].float().any()


@pytest.mark.parametrize("rows", [3, 80])
def test_weights_are_dequantised_by_kernels(rows: int) -> None:
    codes, absmax = nf4.quantize(draw(rows, 128))
    assert torch.equal(nf4.expand_codes(codes, absmax, torch.float32), nf4.dequantize(codes, absmax, torch.float32))
    codes, scales = fp8.quantize(draw(rows, 112))
    assert torch.equal(fp8.scale_codes(codes, scales, torch.float32), fp8.dequantize(codes, scales, torch.float32))


def test_numbers_of_nf4_stay() -> None:
    """Each of the code's numbers, times a scale, is its own quantisation."""
    weight = torch.tensor(nf4.CODE).repeat(2, 4) * torch.tensor([[0.5], [3.0]])
    assert torch.equal(nf4.dequantize(*nf4.quantize(weight), torch.float32), weight)


@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_through_fp8_weights(bias: bool) -> None:
    x, added = draw(9, 128).half(), draw(40).half() if bias else None
    codes, scales = fp8.quantize(draw(40, 128))
    weights = Fp8Weight(codes, added, (40,), scales)
    expected = weights.linear(x)
    counters, shape = torch.zeros(3, dtype=torch.int32), skinny.Shape(16, 32, 2, 4, 2)
    found, _ = skinny.skinny_gemm(x, codes, added, counters, shape, scales)
    torch.testing.assert_close(found, expected, rtol=5e-3, atol=2e-2)
    one = gemv.gemv(x[0], codes, added, (8, 4), scales)
    torch.testing.assert_close(one, expected[0], rtol=5e-3, atol=2e-2)


@pytest.mark.parametrize(
    ("shape", "rows", "bias"),
    [
        (skinny.Shape(16, 32, 1, 4, 2), 17, True),
        (skinny.Shape(32, 64, 2, 4, 2, 4), 64, False),
        (skinny.Shape(64, 32, 4, 4, 2, 1), 33, True),
    ],
)
def test_rounded_rows_through_fp8_weights(shape: skinny.Shape, rows: int, bias: bool) -> None:
    """As torch's product of both codes: rows with a stride, one of zeros, outputs that are no multiple of a block."""
    x, added = draw(rows, 160)[:, :128].bfloat16(), draw(48).bfloat16() if bias else None
    x[3] = 0
    codes, scales = fp8.quantize(draw(48, 128))
    counters = torch.zeros(3, dtype=torch.int32)
    weights = Fp8Weight(codes, added, (48,), scales)
    expected = fp8.product(x, codes, scales).float() + (0 if added is None else added.float())
    for _ in range(2):
        found, workspace = skinny.skinny_gemm(x, codes, added, counters, shape, scales, rounded=True)
        assert found.dtype == x.dtype and any(one.dtype == fp8.E4M3 for one in workspace)
        torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)
        assert not counters.any()
    plain = weights.linear(x).float()
    assert 1e-3 < (found.float() - plain).norm() / plain.norm() < 0.1, "expected x to be rounded, and no more"


@pytest.mark.parametrize(("rows", "cores", "rounded"), [(16, True, False), (17, True, True), (17, False, False)])
def test_more_than_few_rows_are_rounded_where_tensor_cores_take_them(
    rows: int, cores: bool, rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's GEMM and by our own, so that either may take the other's place. In float16, since the interpreter
    cannot multiply in bfloat16."""
    monkeypatch.setattr(fp8, "has_tensor_cores", lambda x: cores)
    codes, scales = fp8.quantize(draw(48, 128))
    x, weights = draw(rows, 128).half(), Fp8Weight(codes, torch.zeros(48).half(), (48,), scales)
    expected = fp8.product(x, codes, scales) if rounded else x @ weights.dense(torch.float16).T
    shape = skinny.Shape(16, 32, 2, 4, 2)
    own = GemmChoice(
        skinny={(most, 128, 48): shape for most in skinny.ROWS}, counters=torch.zeros(3, dtype=torch.int32)
    )
    for choice in (GemmChoice(), own):
        found = choice.quantized_linear(x, weights)
        assert (found.workspace is None) == (choice is not own)
        assert (found.y - expected).float().norm() < 6e-3 * expected.float().norm()


@pytest.mark.parametrize("kind", [fp8, nf4])
def test_backwards_multiply_by_the_dequantised_weight(kind) -> None:
    """Of all sites at once, and of each."""
    codes, scales = kind.quantize(draw(48, 64))
    weights = (Fp8Weight if kind is fp8 else Nf4Weight)(codes, None, (16, 32), scales)
    dy, dx = draw(5, 48), draw(5, 64)
    expected = dy @ weights.dense(torch.float32)
    torch.testing.assert_close(weights.backward(dy), expected)
    torch.testing.assert_close(weights.add_backward(dx.clone(), dy), dx + expected)
    found = dx.clone()
    weights.add_backward_of_sites(found, dy.split((16, 32), 1))
    torch.testing.assert_close(found, dx + expected)
    assert weights.in_features == 64


@pytest.mark.parametrize(("rows", "rounded"), [(16, False), (40, True)])
def test_gradients_are_rounded_where_activations_are(rows: int, rounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of weights of very different norms; rows of dy of which one is zero and one large; each site alone, too."""
    monkeypatch.setattr(fp8, "has_tensor_cores", lambda x: True)
    codes, scales = fp8.quantize(draw(192, 144) * torch.logspace(-2, 1, 192)[:, None])
    own = Fp8Weight(codes, None, (64, 128), scales)
    weights = replace(own, rounds_gradients=False)
    dy, dx = draw(rows, 200)[:, :192], draw(rows, 144)
    dy[3], dy[5] = 0, 1e4 * dy[5]
    most = 0.12 if interpreted() else 0.04  # the interpreter rounds some numbers to FP8 by cutting them off
    expected = weights.backward(dy)
    found = own.backward(dy)
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-6)
    assert (0.01 < errors.max() < most) if rounded else torch.equal(found, expected)
    assert not found[3].any() and errors[5] < most
    torch.testing.assert_close(own.add_backward(dx.clone(), dy), dx + found.float())
    by_site = torch.zeros_like(dx)
    own.add_backward_of_sites(by_site, dy.split((64, 128), 1))
    assert (by_site - expected).norm() < most * expected.norm()


def test_codes_are_transposed_as_they_are() -> None:
    codes, _ = fp8.quantize(draw(144, 272))
    assert torch.equal(fp8.transposed(codes).view(torch.uint8), codes.view(torch.uint8).T)
