from __future__ import annotations

import pytest
import torch

from coserve.kernels.gemm.gemv import gemv, shapes_of


@pytest.mark.parametrize("shape", [(8, 4), (1, 8)])
@pytest.mark.parametrize(("inputs", "outputs"), [(72, 80), (128, 41)])
@pytest.mark.parametrize("bias", [False, True])
def test_one_row(inputs: int, outputs: int, bias: bool, shape: tuple[int, int]) -> None:
    x, weight = torch.randn(1, inputs), torch.randn(outputs, inputs)
    added = torch.randn(outputs) if bias else None
    expected = torch.nn.functional.linear(x, weight, added)
    torch.testing.assert_close(gemv(x[0], weight, added, shape), expected[0], rtol=1e-4, atol=1e-4)


def test_a_program_reads_all_inputs_at_once() -> None:
    assert (4, 4) in shapes_of(4096)
    assert all(block <= 4 for block, _ in shapes_of(14336))
    assert shapes_of(40000) == []
