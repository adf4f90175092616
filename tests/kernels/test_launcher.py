"""A launcher launches what Triton would have: the specialization that these very arguments need."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from coserve.kernels.gpu import launcher
from coserve.kernels.gpu.launcher import Launcher, launch, launch_nothing


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`launch(...)` and what came of it: `searched`, `known`."""
    searched: list[tuple[object, ...]] = []
    known: list[tuple[object, ...]] = []

    class Specialization:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *args: known.append((grid, *args[2:]))

    class Kernel:
        arg_names = ("x_ptr", "y_ptr", "N", "WIDE", "BLOCK")

        def __getitem__(self, grid: object) -> Callable[..., Specialization]:
            def search(*args: object, **rest: object) -> Specialization:
                searched.append((grid, *args[2:], rest))
                return Specialization()

            return search

    monkeypatch.setattr(launcher, "interpreted", lambda: False)
    launches = Launcher(Kernel(), max_cached=4)  # type: ignore[arg-type]
    return SimpleNamespace(launch=launches, searched=searched, known=known)


def place(offset: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor whose address is `offset` elements behind a multiple of 16 bytes."""
    whole = torch.zeros(64, dtype=dtype)
    first = -(whole.data_ptr() // whole.itemsize) % (16 // whole.itemsize)
    return whole[first + offset :]


def test_the_second_launch_finds_the_specialization_and_gives_constants_in_the_kernels_order(
    kernel: SimpleNamespace,
) -> None:
    x, y = place(), place()
    for _ in range(3):
        kernel.launch((2, 1, 1), (x, y), (7,), BLOCK=16, WIDE=True, num_warps=4)
    assert kernel.searched == [((2, 1, 1), 7, {"BLOCK": 16, "WIDE": True, "num_warps": 4})]
    assert kernel.known == [((2, 1, 1), 7, True, 16)] * 2


def test_another_grid_is_the_same_specialization(kernel: SimpleNamespace) -> None:
    x, y = place(), place()
    kernel.launch((2, 1, 1), (x, y), (7,), WIDE=True, BLOCK=16, num_warps=4)
    kernel.launch((5, 3, 1), (x, y), (7,), WIDE=True, BLOCK=16, num_warps=4)
    assert len(kernel.searched) == 1
    assert kernel.known == [((5, 3, 1), 7, True, 16)]


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": (place(1), place())},
        {"tensors": (place(), place(dtype=torch.float16))},
        {"numbers": (8,)},
        {"numbers": (1,)},
        {"rest": {"WIDE": False, "BLOCK": 16, "num_warps": 4}},
        {"rest": {"WIDE": True, "BLOCK": 32, "num_warps": 4}},
        {"rest": {"WIDE": True, "BLOCK": 16, "num_warps": 8}},
    ],
    ids=["alignment", "dtype", "number", "one", "constant", "block", "warps"],
)
def test_what_a_specialization_may_depend_on_is_searched_anew(
    kernel: SimpleNamespace, change: dict[str, object]
) -> None:
    first = {"tensors": (place(), place()), "numbers": (7,), "rest": {"WIDE": True, "BLOCK": 16, "num_warps": 4}}
    for given in (first, first | change, first):
        kernel.launch((1, 1, 1), given["tensors"], given["numbers"], **given["rest"])
    assert len(kernel.searched) == 2
    assert len(kernel.known) == 1


def test_launches_are_forgotten_before_they_are_too_many(kernel: SimpleNamespace) -> None:
    for number in (*range(10), 9, 0):
        kernel.launch((1, 1, 1), (place(), place()), (number,), WIDE=True, BLOCK=16)
    assert [entry[1] for entry in kernel.searched] == [*range(10), 0]
    assert [entry[1] for entry in kernel.known] == [9]


@triton.jit
def add_number(x_ptr, y_ptr, N, number, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < N) + number, mask=i < N)


@pytest.mark.gpu
def test_on_the_gpu_every_launch_computes_what_it_was_asked() -> None:
    launch = Launcher(add_number)
    whole = torch.arange(4096, dtype=torch.float32, device="cuda")
    for _ in range(2):
        for first in (0, 1, 4):
            for size in (1, 16, 100, 1024):
                for number in (1, 16, 7):
                    x = whole[first : first + size]
                    y = torch.zeros(size, device="cuda")
                    launch((-(-size // 64), 1, 1), (x, y), (size, number), BLOCK=64, num_warps=2)
                    torch.testing.assert_close(y, x + number, rtol=0, atol=0)


def test_nothing_is_launched_inside_and_everything_after(kernel: SimpleNamespace) -> None:
    class Kernel:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *args: kernel.known.append(args)

    def both() -> None:
        kernel.launch((2, 1, 1), (place(), place()), (7,), WIDE=True, BLOCK=16, num_warps=4)
        launch(Kernel(), (2,), 5)  # type: ignore[arg-type]

    with launch_nothing():
        both()
    assert not kernel.searched and not kernel.known
    both()
    assert len(kernel.searched) == len(kernel.known) == 1
