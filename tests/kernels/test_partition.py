"""The split of a GPU's multiprocessors: what the driver is asked for, and what is refused. On a GPU:
`tests/gpu/test_partition_gpu.py`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from coserve.core.errors import StartupError
from coserve.kernels.gpu.partition import DriverResource, part_sizes, split_multiprocessors

GPU = torch.device("cuda", 0)


class FakeDriver:
    """A driver of a GPU with `total` multiprocessors, in groups of eight. Structures are read as the driver's header
    says: the type at byte 0, the count at byte 96."""

    def __init__(self, total: int = 132, version: int = 12050, missing: str = "", error: int = 0) -> None:
        self._total, self._version, self._missing, self._error = total, version, missing, error

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name == self._missing:
            raise AttributeError(name)
        found: Callable[..., int] = getattr(type(self), f"_{name}").__get__(self)
        return found

    def _cuInit(self, flags: Any) -> int:  # noqa: N802
        return 0

    def _cuDriverGetVersion(self, to: Any) -> int:  # noqa: N802
        to._obj.value = self._version
        return 0

    def _cuDeviceGet(self, to: Any, number: Any) -> int:  # noqa: N802
        return 0

    def _cuDeviceGetDevResource(self, device: Any, to: Any, kind: Any) -> int:  # noqa: N802
        write(to._obj, kind.value, self._total)
        return 0

    def _cuDevSmResourceSplitByCount(  # noqa: N802
        self, to: Any, groups: Any, whole: Any, rest: Any, flags: Any, least: Any
    ) -> int:
        if self._error:
            return self._error
        size, (kind, total) = -(-least.value // 8) * 8, read(whole._obj)
        groups._obj.value = int(size <= total)
        if size <= total:
            write(to._obj, kind, size)
            write(rest._obj, kind if size < total else 0, total - size)
        return 0

    def _cuGetErrorString(self, code: Any, to: Any) -> int:  # noqa: N802
        to._obj.value = b"invalid resource configuration"
        return 0


def write(resource: ctypes.Structure, kind: int, count: int) -> None:
    at = ctypes.addressof(resource)
    ctypes.c_int.from_address(at).value, ctypes.c_uint.from_address(at + 96).value = kind, count


def read(resource: ctypes.Structure) -> tuple[int, int]:
    at = ctypes.addressof(resource)
    return ctypes.c_int.from_address(at).value, ctypes.c_uint.from_address(at + 96).value


@pytest.mark.parametrize(("share", "sizes"), [(0.5, (72, 60)), (0.25, (40, 92)), (0.001, (8, 124)), (0.9, (120, 12))])
def test_training_gets_its_share_and_generation_the_rest(share: float, sizes: tuple[int, int]) -> None:
    assert part_sizes(GPU, share, open_library=lambda _: FakeDriver()) == sizes


@pytest.mark.parametrize(
    ("driver", "share", "said"),
    [
        (FakeDriver(version=12040), 0.5, "expected a CUDA driver of version 12.5 or later, got 12.4"),
        (FakeDriver(missing="cuGreenCtxCreate", total=132), 0.98, "training_sm_share: 0.98 of 132 multiprocessors"),
        (FakeDriver(total=8), 0.5, "training_sm_share: 0.5 of 8 multiprocessors"),
        (FakeDriver(missing="cuDevSmResourceSplitByCount"), 0.5, "the CUDA driver has no cuDevSmResourceSplitByCount"),
        (FakeDriver(error=914), 0.5, "cuDevSmResourceSplitByCount: invalid resource configuration"),
    ],
)
def test_what_is_not_possible_is_refused_by_name(driver: FakeDriver, share: float, said: str) -> None:
    with pytest.raises(StartupError, match=said.replace("(", r"\(")):
        part_sizes(GPU, share, open_library=lambda _: driver)


def test_there_must_be_a_gpu_and_its_driver() -> None:
    with pytest.raises(StartupError, match="'spatial' needs an NVIDIA GPU, and the base is on cpu"):
        split_multiprocessors(torch.device("cpu"), 0.5)
    with pytest.raises(StartupError, match="needs NVIDIA's CUDA driver"):
        part_sizes(GPU, 0.5, open_library=lambda _: ctypes.CDLL("libnothing.so.1"))


def test_a_resource_has_the_drivers_layout() -> None:
    """`CUdevResource` of cuda.h: 144 bytes, the count at byte 96; a later driver may write more."""
    assert DriverResource.multiprocessors.offset == 96
    assert ctypes.sizeof(DriverResource) >= 144
