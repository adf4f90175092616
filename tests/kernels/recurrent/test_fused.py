"""The kernels of recurrent layers against plain torch: in Triton's interpreter without a GPU, else also in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coserve.kernels.attention.interface import TokenRun
from coserve.kernels.recurrent.fused.steps import FEW, MANY, FusedRecurrence, RecurShape
from coserve.kernels.recurrent.interface import Recurrence, RecurrenceInputs, RecurrenceParams, StateShape
from coserve.kernels.recurrent.packed import PackedRecurrence
from coserve.kernels.recurrent.slots import SlotRecurrence
from coserve.memory.state_pool import StatePool
from tests.support.attention_cases import DEVICE

STEPS = (
    [TokenRun(5, 0, (), 2), TokenRun(1, 0, (), 0), TokenRun(2, 0, (), 3)],
    [TokenRun(1, 5, (), 2), TokenRun(4, 1, (), 0), TokenRun(1, 2, (), 3), TokenRun(3, 0, (), 1)],
    [TokenRun(1, 6, (), 2), TokenRun(1, 5, (), 0)],
    [TokenRun(1, 0, (), 1), TokenRun(1, 7, (), 2), TokenRun(1, 3, (), 3)],
)
PADDING = 3
OTHER_SHAPES = {
    "other": RecurShape(32, 2, by_value=True, stream=True, early=True, registers=128, tokens=4, channels=8),
    "in turns": RecurShape(32, by_value=True, early=True, blocks=4, stages=3),
}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
CASES = {
    "delta rule": (StateShape(20, 4, heads=4, keys=6, values=10), True, False),
    "no delta": (StateShape(20, 3, heads=4, keys=8, values=16), False, False),
    "decay by key": (StateShape(20, 4, heads=8, keys=6, values=1), False, True),
}


def _step(
    recurrence: Recurrence, shape: StateShape, rows: int, *, beta: bool, by_key: bool, dtype: torch.dtype, seed: int
) -> list[Tensor]:
    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(DEVICE, dtype)

    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = random(64, shape.channels)[:rows], random(shape.channels, shape.taps), random(shape.channels)
    heads, keys, groups = shape.heads, shape.keys, 2
    q, k = random(64, 2, groups, keys)[:rows].unbind(1)  # cut from one tensor, as from a convolution's output
    v = random(64, heads, shape.values)[:rows]
    decay = -random(64, *((heads, keys) if by_key else (heads,))).abs()[:rows]
    share = random(64, heads).sigmoid()[:rows] if beta else None
    params = RecurrenceParams(0.4, normalize=beta)
    return [
        recurrence.convolve(0, x, weight, bias if by_key else None, None if by_key else "silu"),
        recurrence.recur(0, RecurrenceInputs(q, k, v, decay, share, params)),
    ]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("launched", [None, *OTHER_SHAPES.values()], ids=["own", *OTHER_SHAPES])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_steps_in_slots(case: str, launched: RecurShape | None, dtype: torch.dtype) -> None:
    """Outputs and the states that the next steps read: chunks, decodes and padding, in any slots."""
    shape, beta, by_key = CASES[case]
    _compare(shape, launched, dtype, beta=beta, by_key=by_key)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "launched",
    [
        FEW,
        MANY,
        RecurShape(16384, 16, by_value=True),
        RecurShape(by_value=True, stream=True, early=True, registers=72, tokens=2, channels=256),
        RecurShape(by_value=True, blocks=4, stages=3, tokens=4),
        RecurShape(2048, by_value=True, stream=True, early=True, blocks=8, stages=5),
        RecurShape(8192, 8, early=True, blocks=2, stages=2, tokens=8, channels=64),
    ],
)
def test_heads_of_a_real_size(launched: RecurShape | None) -> None:
    """Those of Qwen3.5, by shapes that `benchmarks.recurrent.kernels` times."""
    shape = StateShape(20, 4, heads=8, keys=128, values=128)
    _compare(shape, launched, torch.bfloat16, beta=True, by_key=False)


def _compare(shape: StateShape, launched: RecurShape | None, dtype: torch.dtype, *, beta: bool, by_key: bool) -> None:
    own, expected = (StatePool({0: shape}, slots=4, dtype=dtype, device=torch.device(DEVICE)) for _ in range(2))
    for states in (own, expected):  # an earlier sequence's state does not reach the next one
        states.layers[0].recurrent[:4] = 7
        states.layers[0].conv[:4] = 7
    device = torch.device(DEVICE)
    every = FusedRecurrence(own.layers, tokens=16, sequences=5, device=device, shape=launched)
    decodes = FusedRecurrence(own.layers, tokens=8, sequences=8, device=device, decodes=True, shape=launched)
    for seed, runs in enumerate(STEPS):
        rows = sum(run.tokens for run in runs)
        fused = decodes if rows == len(runs) else every
        fused.load(runs)
        plain = SlotRecurrence(expected.layers, runs, torch.device(DEVICE))
        sizes = {"beta": beta, "by_key": by_key, "dtype": dtype, "seed": seed}
        found = _step(fused, shape, rows + PADDING, **sizes)
        for got, want in zip(found, _step(plain, shape, rows, **sizes), strict=True):
            _check(got[:rows], want, dtype)
        assert not found[1][rows:].any()
        for slot in {run.slot for run in runs} | {4}:
            _check(own.layers[0].conv[slot], expected.layers[0].conv[slot], dtype)
            _check(own.layers[0].recurrent[slot], expected.layers[0].recurrent[slot], dtype)


def _check(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_recurrence_in_chunks_is_that_token_by_token() -> None:
    """As training computes it, with sequences of several lengths, and its gradients."""
    bounds = (0, 70, 71, 200, 203)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(203, 2, 5, generator=generator, dtype=torch.float32) for _ in range(2))
    v, decay = torch.randn(203, 2, 3, generator=generator), -torch.rand(203, 2, generator=generator)
    share = torch.rand(203, 2, generator=generator)
    params = RecurrenceParams(0.5, normalize=True)
    for beta in (share, None):
        found = []
        for by_key in (False, True):
            leaves = [x.clone().requires_grad_() for x in (q, k, v, decay)]
            given = leaves[3][..., None].expand(-1, -1, 5) if by_key else leaves[3]
            out = PackedRecurrence(bounds).recur(0, RecurrenceInputs(*leaves[:3], given, beta, params))
            found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)
