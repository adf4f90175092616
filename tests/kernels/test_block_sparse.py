from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from coserve.kernels.lora import reference
from coserve.kernels.lora.block_sparse import BlockSparseBackend
from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair, SiteGroup
from tests.support.lora_grids import (
    Grid,
    adding,
    check_forward,
    check_gradients,
    interpreted,
    make_case,
    relative_error,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
lora_add = adding(BlockSparseBackend())
grids = pytest.mark.parametrize("grid", interpreted())


@grids
def test_forward_with_kept_weights(grid: Grid) -> None:
    check_forward(adding(BlockSparseBackend().keeping()), grid, torch.float32, DEVICE)


@pytest.mark.parametrize("block", [16, 32, 64])
def test_block_sizes_agree(block: int) -> None:
    case = make_case(Grid("mixed", (3, 40, 1), (0, 1, 2), (8, 5, 40)), torch.float32, DEVICE)
    expected = lora_add(case.y.clone(), case.x, case.segments, case.pairs)
    got = adding(BlockSparseBackend(block))(case.y.clone(), case.x, case.segments, case.pairs)
    assert relative_error(got, expected) < 1e-5


@grids
def test_gradients(grid: Grid) -> None:
    check_gradients(lora_add, grid, torch.float32, DEVICE)


@pytest.mark.slow
def test_backward_keeps_its_block_size_when_another_was_used_in_between() -> None:
    grid = Grid("two", (3, 20), (0, 1), (8, 20))
    first, again = (make_case(grid, torch.float32, DEVICE, grad=True) for _ in range(2))
    out = adding(BlockSparseBackend(16))(first.y, first.x, first.segments, first.pairs)
    adding(BlockSparseBackend(64))(again.y, again.x, again.segments, again.pairs).sum().backward()
    out.sum().backward()
    for mine, wanted in zip(first.leaves(), again.leaves(), strict=True):
        assert relative_error(mine.grad, wanted.grad) < 1e-5


@pytest.mark.slow
def test_more_block_rows_than_int16_can_index() -> None:
    grid = Grid("long", (16 * 260,), (0,), (4,), inputs=16, outputs=16)
    case = make_case(grid, torch.float32, DEVICE)
    expected = make_case(grid, torch.float32, DEVICE)
    got = adding(BlockSparseBackend(16))(case.y, case.x, case.segments, case.pairs)
    pair = expected.pairs[0]
    assert pair is not None
    wanted = expected.y + pair.scaling * (expected.x @ pair.a_RD.T) @ pair.b_OR.T
    assert relative_error(got, wanted) < 1e-5


D = 64
SITE = SiteGroup(("q",))
Adapter = Mapping[str, LoraPair]


class Launches(TorchDispatchMode):
    """Counts torch's operations inside."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


def adapter(rank: int, *, grad: bool = False) -> Adapter:
    a_RD, b_OR = (torch.randn(*shape, device=DEVICE).div_(8).requires_grad_(grad) for shape in ((rank, D), (D, rank)))
    return {"q": LoraPair(a_RD, b_OR, 0.5 + rank)}


def step(backend: LoraBackend, adapters: Sequence[Adapter], lengths: Sequence[int]) -> tuple[int, Tensor, Tensor]:
    """One step with a segment of each adapter: the number of operations, the result, and the reference's."""
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    segments = Segments(tuple(bounds), tuple(range(len(adapters))))
    x, y = (torch.randn(bounds[-1], D, device=DEVICE) for _ in range(2))
    expected = reference.lora_add(y, x, segments, [each["q"] for each in adapters])
    with torch.no_grad(), Launches() as launches:
        (got,) = backend.prepare(segments, adapters, [SITE]).add(SITE, [y.clone()], x)
    return launches.count, got, expected


def test_weights_are_copied_in_the_first_step_only() -> None:
    backend = BlockSparseBackend().keeping()
    adapters = [adapter(rank) for rank in (8, 16, 40)]
    first, *later = (step(backend, adapters, lengths)[0] for lengths in ((1, 1, 1), (1, 2, 1), (3, 1, 1)))
    one = BlockSparseBackend().keeping()
    step(one, adapters[:1], (1,))
    least, _, _ = step(one, adapters[:1], (3,))
    assert first > least
    assert later == [least, least], "a step costs the same for any number of adapters"
    assert step(backend, adapters[1:], (1, 2))[0] == least, "an adapter that has left does not matter"
    same, got, expected = step(backend, adapters[1:], (1, 2))
    assert same < least, "steps of the same sequences share their topology"
    assert relative_error(got, expected) < 1e-5


def test_kept_weights_are_never_stale_and_never_exceed_their_limit() -> None:
    """Adapters come, go, and are replaced in the same memory, in steps that may have more than the limit holds."""
    draw = random.Random(0)

    class Small(BlockSparseBackend):
        kept_bytes = 256 * 2 * D * 4

    backend = Small().keeping()
    known = [adapter(draw.choice((3, 16, 32, 33, 70))) for _ in range(9)]
    for _ in range(40):
        if draw.random() < 0.5:  # another version takes an adapter's memory
            at = draw.randrange(len(known))
            old = known[at]["q"]
            backend.forget(known[at])
            with torch.no_grad():
                old.a_RD.normal_()
            known[at] = {"q": LoraPair(old.a_RD, old.b_OR, old.scaling + 1)}
        chosen = draw.sample(known, draw.randint(1, 6))
        _, got, expected = step(backend, chosen, [draw.choice((1, 2, 40)) for _ in chosen])
        assert relative_error(got, expected) < 1e-5
        assert backend.bytes <= Small.kept_bytes


def test_trained_weights_are_copied_after_an_optimizer_changed_them() -> None:
    adapters = [adapter(rank, grad=True) for rank in (8, 20)]
    backend, lora = BlockSparseBackend(), None
    counts = list[int]()
    for number, lengths in enumerate(((3, 4), (5, 1), (2, 2))):
        bounds = (0, lengths[0], sum(lengths))
        segments = Segments(bounds, (0, 1))
        x, y = (torch.randn(bounds[-1], D, device=DEVICE) for _ in range(2))
        if number == 2:  # an optimizer's step
            with torch.no_grad():
                for each in adapters:
                    each["q"].b_OR.mul_(2)
        lora = backend.prepare(segments, adapters, [SITE]) if lora is None else lora.for_batch(segments)
        assert lora is not None
        leaves = [tensor for each in adapters for tensor in (each["q"].a_RD, each["q"].b_OR)]

        def gradients(add: Callable[[], Tensor], leaves: Sequence[Tensor] = leaves) -> Sequence[Tensor]:
            return torch.autograd.grad(add().square().sum(), leaves)

        expected = gradients(lambda: reference.lora_add(y, x, segments, [each["q"] for each in adapters]))  # noqa: B023
        with Launches() as launches:
            got = gradients(lambda: lora.add(SITE, [y], x)[0])  # noqa: B023
        counts.append(launches.count)
        for mine, wanted in zip(got, expected, strict=True):
            assert relative_error(mine, wanted) < 1e-5
    assert counts[1] < counts[2] <= counts[0], "weights that did not change are not copied again"
