"""The kernels of recurrent layers against plain torch: in Triton's interpreter without a GPU, else also in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from coserve.kernels.attention.interface import TokenRun
from coserve.kernels.gpu.capture import captured
from coserve.kernels.recurrent.chunked.recurrence import LEAST_SIZE
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
LONG_STEPS = (
    [TokenRun(70, 0, (), 2), TokenRun(1, 0, (), 0), TokenRun(21, 0, (), 3)],
    [TokenRun(5, 70, (), 2), TokenRun(129, 1, (), 0), TokenRun(1, 21, (), 3), TokenRun(20, 0, (), 1)],
    [TokenRun(1, 75, (), 2), TokenRun(1, 130, (), 0), TokenRun(64, 22, (), 3), TokenRun(65, 20, (), 1)],
    [TokenRun(3, 0, (), 1), TokenRun(1, 131, (), 0)],
)
"""Runs of `CHUNKED_FROM` tokens and more are computed in chunks."""
CHUNKED_FROM = 20
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
    x, weight, bias = random(192, shape.channels)[:rows], random(shape.channels, shape.taps), random(shape.channels)
    given = _inputs(shape, rows, beta=beta, by_key=by_key, dtype=dtype, seed=seed + 100)
    return [
        recurrence.convolve(0, x, weight, bias if by_key else None, None if by_key else "silu"),
        recurrence.recur(0, given),
    ]


def _inputs(
    shape: StateShape, rows: int, *, beta: bool, by_key: bool, dtype: torch.dtype, seed: int
) -> RecurrenceInputs:
    def random(*sizes: int) -> Tensor:
        return torch.randn(192, *sizes, generator=generator).to(DEVICE, dtype)[:rows]

    generator = torch.Generator().manual_seed(seed)
    heads, keys, groups = shape.heads, shape.keys, 2
    q, k = random(2, groups, keys).unbind(1)  # cut from one tensor, as from a convolution's output
    v, decay = random(heads, shape.values), -random(*((heads, keys) if by_key else (heads,))).abs() / 8
    share = random(heads).sigmoid() if beta else None
    return RecurrenceInputs(q, k, v, decay, share, RecurrenceParams(0.4, normalize=beta))


@pytest.mark.parametrize(
    ("case", "launched"),
    [*((case, "own") for case in CASES), ("delta rule", "other"), ("decay by key", "other"), ("no delta", "in turns")],
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_steps_in_slots(case: str, launched: str, dtype: torch.dtype) -> None:
    """Outputs and the states that the next steps read: chunks, decodes and padding, in any slots."""
    shape, beta, by_key = CASES[case]
    _compare(shape, OTHER_SHAPES.get(launched), dtype, beta=beta, by_key=by_key)


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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.slow
def test_long_runs_are_computed_in_chunks(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the states in their slots and back, beside runs that are computed token by token. Decays by key never are
    in chunks."""
    monkeypatch.setattr(FusedRecurrence, "chunked_from", CHUNKED_FROM)
    shape, beta, by_key = CASES[case]
    large = {"heads": 8, "keys": 128, "values": 128} if dtype == torch.bfloat16 and not by_key else {"heads": 2}
    shape = replace(shape, **large)
    _compare(shape, None, dtype, beta=beta, by_key=by_key, steps=LONG_STEPS)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.slow
def test_a_prompt_cut_anywhere_leaves_the_same_state(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, whose sums round otherwise than token by token."""
    size = 16 if dtype == torch.float32 else LEAST_SIZE
    shape, tokens = StateShape(20, 4, heads=2, keys=size, values=size + 8), 100

    def computed(*cuts: int) -> tuple[Tensor, Tensor]:
        states = StatePool({0: shape}, slots=1, dtype=dtype, device=torch.device(DEVICE))
        fused = FusedRecurrence(states.layers, tokens=tokens, sequences=2, device=torch.device(DEVICE))
        outputs = []
        for start, end in pairwise(cuts):
            fused.load([TokenRun(end - start, start, (), 0)])
            given = _inputs(shape, tokens, beta=True, by_key=False, dtype=dtype, seed=0)
            outputs.append(fused.recur(0, given.rows(lambda x, start=start, end=end: x[start:end])))
        return torch.cat(outputs), states.layers[0].recurrent[0]

    monkeypatch.setattr(FusedRecurrence, "chunked_from", None)
    by_token = computed(0, tokens)
    monkeypatch.setattr(FusedRecurrence, "chunked_from", CHUNKED_FROM)
    whole = computed(0, tokens)
    assert not torch.equal(whole[1], by_token[1])
    for got in (by_token, computed(0, 1, tokens), computed(0, 64, tokens), computed(0, 19, 30, 95, tokens)):
        for one, right in zip(got, whole, strict=True):
            _near(one, right, dtype)


def test_neighbours_of_a_long_run_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedRecurrence, "chunked_from", CHUNKED_FROM)
    shape, run = StateShape(20, 4, heads=2, keys=16, values=24), TokenRun(75, 0, (), 0)
    given, found = _inputs(shape, 130, beta=True, by_key=False, dtype=torch.float32, seed=0), []
    for runs in ([run], [run, TokenRun(1, 0, (), 1), TokenRun(54, 0, (), 2)]):
        states = StatePool({0: shape}, slots=3, dtype=torch.float32, device=torch.device(DEVICE))
        fused = FusedRecurrence(states.layers, tokens=130, sequences=4, device=torch.device(DEVICE))
        fused.load(runs)
        found.append((fused.recur(0, given)[:75], states.layers[0].recurrent[0]))
    for alone, beside in zip(*found, strict=True):
        assert torch.equal(alone, beside)


@pytest.mark.gpu
def test_one_graph_serves_steps_of_any_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With long runs or without: the bits of steps that are not captured, and states of other slots as they were."""
    monkeypatch.setattr(FusedRecurrence, "chunked_from", CHUNKED_FROM)
    shape, device = StateShape(20, 4, heads=4, keys=128, values=128), torch.device(DEVICE)
    given = _inputs(shape, 192, beta=True, by_key=False, dtype=torch.bfloat16, seed=0)
    states = StatePool({0: shape}, slots=4, dtype=torch.bfloat16, device=device)
    slots = states.layers[0].recurrent
    steps = [FusedRecurrence(states.layers, tokens=192, sequences=4, device=device) for _ in range(2)]
    steps[0].recur(0, given)  # compiles
    graph = torch.cuda.CUDAGraph()
    with captured(graph):
        out = steps[0].recur(0, given)
    for lengths in ([70, 1, 100], [192], [1, 1], [19, 64, 65, 20]):
        found = []
        for step in steps:
            slots[:4] = 1
            step.load([TokenRun(length, 1, (), i) for i, length in enumerate(lengths)])
            if step is steps[0]:
                graph.replay()
            found.append(((out if step is steps[0] else step.recur(0, given)).clone(), slots[:4].clone()))
        for replayed, launched in zip(*found, strict=True):
            assert torch.equal(replayed, launched)
        assert (slots[len(lengths) : 4] == 1).all()


def _compare(
    shape: StateShape,
    launched: RecurShape | None,
    dtype: torch.dtype,
    *,
    beta: bool,
    by_key: bool,
    steps: Sequence[list[TokenRun]] = STEPS,
) -> None:
    own, expected = (StatePool({0: shape}, slots=4, dtype=dtype, device=torch.device(DEVICE)) for _ in range(2))
    for states in (own, expected):  # an earlier sequence's state does not reach the next one
        states.layers[0].recurrent[:4] = 7
        states.layers[0].conv[:4] = 7
    device = torch.device(DEVICE)
    most, check = max(sum(run.tokens for run in runs) for runs in steps) + PADDING, _check if steps is STEPS else _near
    every = FusedRecurrence(own.layers, tokens=most, sequences=5, device=device, shape=launched)
    decodes = FusedRecurrence(own.layers, tokens=8, sequences=8, device=device, decodes=True, shape=launched)
    for seed, runs in enumerate(steps):
        rows = sum(run.tokens for run in runs)
        fused = decodes if rows == len(runs) else every
        fused.load(runs)
        plain = SlotRecurrence(expected.layers, runs, torch.device(DEVICE))
        sizes = {"beta": beta, "by_key": by_key, "dtype": dtype, "seed": seed}
        found = _step(fused, shape, rows + PADDING, **sizes)
        for got, want in zip(found, _step(plain, shape, rows, **sizes), strict=True):
            check(got[:rows], want, dtype)
        assert not found[1][rows:].any()
        for slot in {run.slot for run in runs} | {4}:
            check(own.layers[0].conv[slot], expected.layers[0].conv[slot], dtype)
            check(own.layers[0].recurrent[slot], expected.layers[0].recurrent[slot], dtype)


def _check(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def _near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Sums in another order, whose inputs are rounded: close as a whole."""
    difference = torch.linalg.vector_norm(got.float() - want.float())
    assert float(difference) <= TOLERANCE[dtype] * float(torch.linalg.vector_norm(want.float()))


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
